"""Database backend for PostgreSQL. Each shard is a schema. The shards of a node (a database server)
share its sessions (server connections).
"""
