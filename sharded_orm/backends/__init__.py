"""Database backends of the shards. A session (server connection) belongs to a node, not to one shard."""
