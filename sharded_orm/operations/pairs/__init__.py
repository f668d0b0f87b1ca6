"""Pairs of servers that replicate from each other (Yupoo, Y9).

Each shard on a pair has an *active* side, which takes its writes, and a *passive* side, on which the
database refuses them. Other shards of the pair may be active on the other side, so that both machines
work.

If the active side is dead, ``forced_switch`` gives it up, and ``rejoin`` brings it back later.
``pair_servers`` opens the two servers, ``replication_check`` finds what makes replication in both
directions unsafe, and ``replication_setup`` starts it. ``side_switch`` makes the other side active.
``rolling_upgrade`` gives both sides a new schema, one after the other.
"""

from typing import Final

#: The kind under which the journal stores the runs that switch sides.
KIND: Final = "switch sides"
