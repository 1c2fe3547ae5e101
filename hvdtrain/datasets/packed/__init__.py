"""Data sets in a few large shards."""
