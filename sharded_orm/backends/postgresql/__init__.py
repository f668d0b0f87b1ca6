"""The backend for PostgreSQL: each shard is a schema, and the shards of a node share its connections."""
