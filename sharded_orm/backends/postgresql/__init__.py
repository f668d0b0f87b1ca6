"""Database backend for PostgreSQL. Each shard is a schema. All shards of a node (a database server)
share a pool of sessions (server connections).
"""
