"""The fleet pages of the admin: shards, ticket servers, operations, and the topology."""
