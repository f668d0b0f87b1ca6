"""The backend for MySQL and MariaDB. A shard is a schema; sessions are leased from the node's pool."""
