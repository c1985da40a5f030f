"""The run-time side of the fixes."""
