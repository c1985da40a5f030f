"""Memory snapshots: model, parsing, columns, timeline, attribution, segments, diff."""
