"""Evidence, flowchart, rules and verdict; parsing of out-of-memory texts."""
