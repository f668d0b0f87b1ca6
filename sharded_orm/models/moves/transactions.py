"""Refuse a transaction that would see a key both before and after a move.

A transaction may have read a key's rows on a shard that the key has left since. On the new shard,
the snapshot of the transaction may be older than the rows that the move has copied there. So an
open transaction remembers on which shard it used each key. For each shard, it also remembers which
moves were known when the transaction began there. See docs/decisions/0028-key-moves.md.
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

# Keys of the dict in which an open transaction remembers two things: the placements (shards) of its
# keys, and the snapshot of its first statement for several shards.
_KEYS, _FIRST_SCATTER = "keys", "scatter"


def poll_before_snapshot(shard: Shard) -> Poll | None:
    """Return the moves of keys that are known before a transaction on ``shard`` takes its snapshot.

    A snapshot is the state of the rows that all statements of the transaction read. Return None if
    keys of the group do not move, or if nothing is known of their moves.

    Costs one reading of the clock. Also costs a query to the directory (the table of each key's
    shard) if a key is moving to this shard, or if the directory's last answer has passed half of
    the time for which it is valid.
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
            # A key is moving to this shard. Query the moves again, because the key may have been
            # switched to this shard since the last query.
            poll = lease.renew()
    # The directory cannot be queried. Ignore the exception, whichever driver raises it: the
    # transaction may send only raw SQL, which needs no directory. If the transaction looks up a key,
    # the look-up raises the error.
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
    """Whether the last move of ``key`` ended before the transaction on the key's shard began."""
    group = strategy.group.name
    alias = runtime.shard(group, placement.shard).alias
    wrapper: Any = connections[group]
    if alias not in wrapper.open_transactions():
        # The transaction has taken no snapshot of the shard yet, so its snapshot will contain the
        # move.
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
    # The key may have moved after ``poll``, which this process read just before the transaction's first
    # statement took the snapshot (the state of the rows that the transaction sees). The version of the
    # placement is the number of the key's last move. Later moves have higher numbers. So the snapshot
    # contains this move if ``poll`` knows its number, and does not list it as unfinished.
    return placement.version <= poll.moves.last and not any(
        move.number == placement.version and not has_switched(move) for move in poll.moves.in_flight
    )


def snapshots(strategy: DirectoryStrategy) -> list[Snapshot]:
    """Return the snapshots that this thread's open transactions have of shards of the group.

    Also add the keys that these transactions have used to the keys that the current operation
    checks at its end.

    :raises KeyMoved: it is unknown which moves a snapshot contains.
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
    """Store ``poll`` in the open transaction, if this is its first statement for several shards.

    Does nothing outside of transactions.

    :param poll: the moves of keys that are known when the statement is sent.
    """
    wrapper: Any = connections[group]
    if wrapper.is_in_transaction():
        wrapper.transaction_memory.setdefault(_FIRST_SCATTER, Snapshot(poll))
