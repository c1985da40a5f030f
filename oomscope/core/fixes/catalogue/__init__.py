"""The fixes, one module for each place where memory can be saved."""
