"""Database backends of the shards; connections belong to nodes, not to shards."""
