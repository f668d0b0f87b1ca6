"""A transaction uses each key at one place: it raises an error if a key switches while it is open.

A transaction may have read rows of a key on its former shard. And its snapshot on the new shard may be
older than the rows that the move has published there. So an open transaction remembers the placement
of each key that it uses, and what was known of moves when it began on each shard. See
docs/decisions/0028-key-moves.md.
"""

from __future__ import annotations

from typing import Any

from django.db import connections

from sharded_orm import runtime
from sharded_orm.backends.group.shard_connections import thread_wrapper
from sharded_orm.exceptions import KeyMoved
from sharded_orm.models.moves.confirmation import key_moved
from sharded_orm.routing.directory import DirectoryStrategy
from sharded_orm.routing.placement_lease import Poll
from sharded_orm.routing.placement_uses import KnownPlacement, current_uses
from sharded_orm.routing.scattered_keys import Snapshot, has_switched
from sharded_orm.topology.model import Shard

# What the memory of a transaction holds: the placements of its keys, and the snapshot of its first
# statement for several shards.
_KEYS, _FIRST_SCATTER = "keys", "scatter"


def poll_before_snapshot(shard: Shard) -> Poll | None:
    """Return what is known of moves before a transaction on ``shard`` takes its snapshot.

    Costs a look at the clock, and the query of the lease if half of it is over, or if a key is moving
    to this shard. Return None if keys of the group do not move, or nothing is known of them.
    """
    strategy = runtime.strategy(shard.group)
    if not isinstance(strategy, DirectoryStrategy) or not strategy.moves_keys:
        return None
    lease = strategy.lease
    try:
        poll = lease.current()
        if poll is not None and any(
            (move.group, move.target) == (shard.group, shard.number) and not has_switched(move)
            for move in poll.moves.in_flight
        ):
            # The key may have switched meanwhile.
            poll = lease.renew()
    except Exception:  # Of any driver. Raw SQL does not need the directory; a look-up raises it.
        return None
    return poll


def moves_keys_now(group: str) -> bool:
    """Whether keys of ``group`` can move at this moment: not inside Django's ``TestCase``. No query."""
    strategy = runtime.strategy(group)
    if not isinstance(strategy, DirectoryStrategy) or not strategy.moves_keys:
        return False
    return not strategy.lease.is_suspended


def check_use(strategy: DirectoryStrategy, key: str, placement: KnownPlacement) -> None:
    """Raise an error if a transaction of this thread must not use ``key`` at ``placement``.

    No query. Does nothing outside of transactions.

    :param key: the text under which the directory stores the key.
    :raises KeyMoved: the key has switched to another shard since the transaction used it, or may have
        switched since the transaction took its snapshot of the shard. The lease is renewed in this
        case, so the transaction succeeds if it is run again.
    """
    group = strategy.group.name
    wrapper = thread_wrapper(group)
    if wrapper is None or not wrapper.is_in_transaction():
        return
    memory = wrapper.transaction_memory.setdefault(_KEYS, {})
    used = memory.get(key)
    if used is None:
        if placement.version and not _is_in_snapshot(strategy, key, placement):
            raise refused_use(group, "may have moved after the transaction began")
        memory[key] = placement
    elif used[:2] != placement[:2]:
        raise refused_use(group, "moved to another shard while a transaction used it")


def refused_use(group: str, what: str) -> KeyMoved:
    """Return the error for a transaction that must be run again, and renew the lease."""
    runtime.placement_lease().renew()
    return key_moved(group, what)


def _is_in_snapshot(strategy: DirectoryStrategy, key: str, placement: KnownPlacement) -> bool:
    """Whether the last move of ``key`` had switched before the transaction on its shard began."""
    group = strategy.group.name
    alias = runtime.shard(group, placement.shard).alias
    wrapper: Any = connections[group]
    if alias not in wrapper.open_transactions():
        return True  # The shard takes its snapshot later.
    shard: Any = connections[alias]
    if shard.awaits_snapshot:
        return True
    poll: Poll | None = shard.known_at_snapshot
    if poll is None:
        return False
    now = strategy.lease.valid()
    if now is not None and now.covers(group, key, poll.number):
        return True
    # The key is in flight, or the lease was over in between. Moves have ascending numbers.
    return placement.version <= poll.moves.last and not any(
        move.number == placement.version and not has_switched(move) for move in poll.moves.in_flight
    )


def snapshots(strategy: DirectoryStrategy) -> list[Snapshot]:
    """Return the snapshots that the open transactions of this thread have of shards of the group.

    Record the keys that the transaction has used as uses of the running operation, too.

    :raises KeyMoved: it is unknown what a snapshot has.
    """
    group = strategy.group.name
    wrapper: Any = connections[group]
    if not wrapper.is_in_transaction():
        return []
    memory, taken = wrapper.transaction_memory, []
    if _FIRST_SCATTER in memory:
        taken.append(memory[_FIRST_SCATTER])
    for alias in wrapper.open_transactions():
        shard: Any = connections[alias]
        if shard.awaits_snapshot:
            continue
        if shard.known_at_snapshot is None:
            raise refused_use(group, "may have moved after the transaction began")
        taken.append(Snapshot(shard.known_at_snapshot, shard.shard.number))
    uses = current_uses()
    for key, placement in memory.get(_KEYS, {}).items():
        if uses is not None:
            uses.record(strategy, key, placement)
    return taken


def remember_scatter(group: str, poll: Poll) -> None:
    """Remember in the open transaction, if there is one, what its first scatter knew of moves."""
    wrapper: Any = connections[group]
    if wrapper.is_in_transaction():
        wrapper.transaction_memory.setdefault(_FIRST_SCATTER, Snapshot(poll))
