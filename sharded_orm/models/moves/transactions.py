"""Refuses a transaction that would see the rows of a key both before and after a move.

There are two cases. In the first, the transaction has used the key on one shard, and then the key
has moved to another. In the second, the transaction has taken its snapshot of a shard (the state
that all its statements read) before the rows of the key came there.

So an open transaction remembers the shard of each key that it has used, and for each shard the
moves that were known when it began there. See docs/decisions/0028-key-moves.md.
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

# Keys of the dict ``transaction_memory`` of an open transaction. The first entry has the shard of
# each shard key that the transaction has used. The second has the snapshot of its first statement
# for several shards.
_KEYS, _FIRST_SCATTER = "keys", "scatter"


def poll_before_snapshot(shard: Shard) -> Poll | None:
    """Return the moves of keys that are known before a transaction on ``shard`` takes its snapshot.

    A snapshot is the state of the rows that all statements of the transaction read. Return None if
    keys of the group do not move, or if the moves are unknown.

    Cost: one reading of the clock. In two cases also one query to the directory, the table of each
    key's shard. The first case is that a key is moving to this shard. In the second, the last
    answer of the directory is valid for a limited time, and half of this time is over.
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
            # A key is moving to this shard. Query the directory again, because the key may have been
            # switched to this shard since the last query.
            poll = lease.renew()
    # Every exception means that the directory cannot be queried. Ignore it, because the transaction
    # may send only raw SQL, which needs no directory. If the transaction uses a key later, the
    # look-up of the key raises the error.
    except Exception:
        return None
    return poll


def moves_keys_now(group: str) -> bool:
    """Whether keys of ``group`` can move now. False inside Django's ``TestCase``. Sends no query."""
    strategy = runtime.strategy(group)
    if not isinstance(strategy, DirectoryStrategy) or not strategy.moves_keys:
        return False
    return not strategy.lease.is_suspended


def check_use(strategy: DirectoryStrategy, key: str, placement: KnownPlacement) -> None:
    """Raise an error if a transaction of this thread must not use ``key`` on the shard of ``placement``.

    Does nothing outside of transactions. Sends no query.

    :param key: the text under which the directory (the table of each key's shard) stores the key.
    :param placement: the shard to which the directory assigns the key now.
    :raises KeyMoved: the key has moved to another shard since the transaction used it, or it may
        have moved since the transaction took its snapshot of the shard. The transaction succeeds if
        it is run again.
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
    """Return the error for a transaction that must be run again.

    Also query the latest moves from the directory, so that the next attempt succeeds.
    """
    runtime.placement_lease().renew()
    return key_moved(group, what)


def _is_in_snapshot(strategy: DirectoryStrategy, key: str, placement: KnownPlacement) -> bool:
    """Whether this thread's transaction on the key's shard sees the rows of the key's last move.

    It sees them if the move had switched ``key`` to this shard before the transaction took its
    snapshot. Return False if that is unknown.
    """
    group = strategy.group.name
    alias = runtime.shard(group, placement.shard).alias
    wrapper: Any = connections[group]
    if alias not in wrapper.open_transactions():
        # No transaction has begun on the key's shard. When it begins, its snapshot will contain the
        # moved rows.
        return True
    shard: Any = connections[alias]
    if shard.awaits_snapshot:
        return True
    poll: Poll | None = shard.known_at_snapshot
    if poll is None:
        return False
    now = strategy.lease.valid()
    if now is not None and now.covers(group, key, poll.number):
        return True
    # ``poll`` is what was known of all moves just before the transaction took its snapshot.
    # ``placement.version`` is the number of the key's last move. The snapshot contains the moved
    # rows if ``poll`` knows of this move, and if the move had already switched the key to its new
    # shard.
    return placement.version <= poll.moves.last and not any(
        move.number == placement.version and not has_switched(move) for move in poll.moves.in_flight
    )


def snapshots(strategy: DirectoryStrategy) -> list[Snapshot]:
    """Return the snapshots of shards of the group that this thread's transactions have taken.

    Also record the keys that these transactions have used. When the current operation ends, it
    checks that the recorded keys have not moved.

    :raises KeyMoved: it is unknown which moves had ended when one of the snapshots was taken.
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
    """Remember ``poll`` as the snapshot of the first statement for several shards in a transaction.

    Called for each such statement. Does nothing after the first, and outside of transactions.

    :param poll: the moves of keys that are known when the statement is sent.
    """
    wrapper: Any = connections[group]
    if wrapper.is_in_transaction():
        wrapper.transaction_memory.setdefault(_FIRST_SCATTER, Snapshot(poll))
