"""The fleet pages: shards, tickets, operations and the topology, in the admin."""
