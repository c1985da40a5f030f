"""Command lines, launchers, process groups, supervision, prediction runs, the rerun loop."""
