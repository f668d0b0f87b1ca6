"""Master-master pairs: two servers that replicate from each other. Each shard is active on one side.

``pair_servers`` opens the two servers, ``replication_check`` finds what makes replication in both
directions unsafe, and ``replication_setup`` starts it. ``rolling_upgrade`` gives both sides a new schema,
one after the other.
"""
