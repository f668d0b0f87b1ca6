"""MySQL and MariaDB: shards are schemas, sessions are leased from the node's pool."""
