"""Database backends of the shards. A session (an open connection to a server) belongs to a node (a
database server), and can serve any shard of the node.
"""
