"""A session folder as RankState objects; no UI."""
