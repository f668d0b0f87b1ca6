"""Database backend for MySQL and MariaDB. Each shard is a schema. A shard's connection leases its
server sessions from the pool of the node (the database server).
"""
