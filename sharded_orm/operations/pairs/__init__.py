"""Pairs of servers that replicate from each other (Yupoo, Y9).

Each shard on a pair has an *active* side, which takes its writes, and a *passive* side, on which
the database refuses them. Some shards are active on one server and some on the other, so that both
servers have work.

- ``pair_servers`` opens connections to the two servers.
- ``replication_check`` finds what makes replication in both directions unsafe, and
  ``replication_setup`` starts the replication.
- ``side_switch`` makes the passive side of a shard the active one.
- ``forced_switch`` does so if the server of the active side is down, and ``rejoin`` brings this
  server back later.
- ``rolling_upgrade`` gives shards a new schema on their passive side first, and then on the other.
"""

from typing import Final

#: The kind of the journal's runs that switch sides.
KIND: Final = "switch sides"
