"""The pure domain: no torch, no UI, no processes."""
