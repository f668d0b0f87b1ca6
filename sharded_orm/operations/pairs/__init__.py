"""Pairs of servers that replicate from each other (Yupoo, Y9).

Each shard on a pair has an *active* side, which takes its writes, and a *passive* side, on which
the database refuses them. Some shards are active on one server and some on the other, so both work.

- ``pair_servers`` opens the two servers.
- ``replication_check`` finds what makes replication in both directions unsafe, and
  ``replication_setup`` starts it.
- ``side_switch`` makes the other side active.
- ``forced_switch`` gives up a dead active side, and ``rejoin`` brings it back later.
- ``rolling_upgrade`` gives both sides a new schema, one after the other.
"""

from typing import Final

#: The kind under which the journal stores the runs that switch sides.
KIND: Final = "switch sides"
