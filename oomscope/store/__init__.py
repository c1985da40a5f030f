"""Session folders: append, tail, manifest, retention; safe loading of snapshots."""
