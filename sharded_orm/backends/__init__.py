"""Database backends of the shards. A session (server connection) belongs to a node (a database server),
not to one shard.
"""
