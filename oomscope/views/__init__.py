"""View models: core and live objects as rows, series and sentences; shared by report and tui."""
