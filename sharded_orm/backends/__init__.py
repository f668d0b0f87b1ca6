"""Database backends of the shards. Server connections belong to nodes (servers), not to shards."""
