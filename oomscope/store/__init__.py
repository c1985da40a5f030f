"""Session folders: append, tail, manifest; safe loading of snapshots."""
