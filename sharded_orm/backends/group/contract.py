"""Protocols between the connection object of a shard group and those of its shards.

In each thread, a group's alias has one connection object, and so has each shard in use. The
connection objects of the shards are called the group's members. Each protocol lists only the
attributes and methods that the other side uses.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Protocol

from django.db.transaction import Atomic

from sharded_orm.topology.model import Shard


class GroupMember(Protocol):
    """The connection object of one shard, as the connection object of its group uses it."""

    alias: str
    connection: Any
    close_at: float | None
    settings_dict: dict[str, Any]
    autocommit: bool
    needs_rollback: bool
    savepoint_ids: list[str]
    run_on_commit: list[Any]
    features: Any
    features_class: type[Any]
    transaction_writes: Any
    shard: Shard | None
    #: The alias by which this object looks up its current settings in the topology (the map of
    #: shards to nodes).
    topology_alias: str
    #: Whether this object was used since the group last closed obsolete connections.
    is_active: bool

    # Private attributes that only sharded_orm.backends.group may use.
    _generation: int | None
    _in_atomic_block: bool
    _mirrored: list[Atomic]
    _syncing: bool
    _thread_ident: int

    @property
    def commits_with_group(self) -> bool:
        """Whether this shard commits when the group's outermost atomic block ends."""

    @property
    def has_failed(self) -> bool:
        """Whether a statement of the transaction has failed, so that the database has rolled back the
        statements before it, or would answer COMMIT by a rollback.
        """

    @property
    def has_lost_session(self) -> bool:
        """Whether the session of the transaction is known to be lost, so that COMMIT raises an error."""

    @property
    def seems_lost(self) -> bool:
        """Whether the server seems to have closed the session of the transaction. Sends nothing."""

    def reads_as_autocommit(self) -> bool:
        """Whether the transaction has only read. False if the backend does not know."""

    def check_deferred_constraints(self) -> None:
        """Check the constraints that the database would check at COMMIT.

        :raises django.db.IntegrityError: the transaction violates a constraint.
        """

    def announce_commit(self) -> None:
        """Announce to the cache that the transaction's writes are about to be committed."""

    def leave_group_levels(self, depth: int, *, commit: bool) -> None:
        """End the atomic blocks that this shard has opened for levels of its group.

        A level is an open block of the group's transaction: the outermost block, or a savepoint.

        :param depth: index, in the group's ``levels``, of the outermost level to end. The levels inside
            it are ended first.
        :param commit: True to commit the transaction or release the savepoints; False to roll them
            back.
        """

    def is_idle(self) -> bool:
        """Whether this connection object can be closed without any loss.

        True if it has no unread results, no session state, and no session leased from a pool.
        """

    def is_evictable(self) -> bool:
        """Whether this connection object can be closed and dropped without anyone noticing.

        False, for example, if it has a transaction, session state or unread results, or if a test
        captures its queries.
        """

    def holds_session(self) -> bool:
        """Whether closing this object would lose a transaction or session state.

        Unread results do not count.
        """

    def forget_server(self) -> None:
        """Forget all cached facts about the server, because the next connection may go to another
        server.
        """

    def take_settings(self, settings_dict: dict[str, Any], generation: int) -> None:
        """Use ``settings_dict`` for connections from now on.

        Called only if there is no open connection, or if the new settings do not affect the open
        connection.

        :param generation: number of the topology (the map of shards to nodes) that the settings
            come from.
        """

    def check_constraints(self, table_names: Any = None) -> None: ...
    def close(self) -> None: ...
    def close_if_unusable_or_obsolete(self) -> None: ...


class Members(Protocol):
    """The connection objects of a group's shards in one thread."""

    wrappers: OrderedDict[str, Any]

    def add(self, wrapper: Any) -> None:
        """Make ``wrapper`` the connection object of its alias in this thread."""

    def forget(self, wrapper: Any) -> None:
        """Drop ``wrapper`` from the thread's connections. Callers that refer to it may still use it."""

    def record_connect(self, wrapper: Any) -> None:
        """Record that ``wrapper`` has connected. The connection is closed when the moment
        ``wrapper.close_at`` (of ``time.monotonic()``) has come.
        """

    def record_use(self, wrapper: Any) -> None:
        """Record that ``wrapper`` was used since the group last closed obsolete connections."""


class GroupCoordinator(Protocol):
    """Commits the transactions of a group's shards together. Without a coordinator, the group
    commits one shard after the other.
    """

    def join(self, member: Any) -> None:
        """Make the transaction of a shard part of the group's transaction.

        Called before the first statement of the shard's transaction is sent.

        If this raises an error, the whole transaction is rolled back.

        :param member: the shard's connection object.
        """

    def commit(self, members: Any) -> None:
        """Commit the transactions of ``members`` on all shards or on none.

        If this raises an error, the caller rolls back the transactions that are still open, and raises
        the error.

        :param members: the connection objects of all shards in the transaction.
        """


class GroupAlias(Protocol):
    """The connection object of a whole group, as used by the connection objects of its shards."""

    alias: str
    levels: list[Any]
    force_debug_cursor: bool
    queries_log: Any
    execute_wrappers: list[Any]
    coordinator: GroupCoordinator | None
    #: The connection objects of the shards that take part in the group's transaction, by alias.
    participants: dict[str, Any]

    @property
    def shards(self) -> Members: ...
    @property
    def needs_rollback(self) -> bool: ...
    def connect(self) -> None: ...
    def validate_no_broken_transaction(self) -> None: ...

    def block_options(self, level: Any) -> tuple[bool, bool]:
        """Return ``durable`` and ``_from_testcase`` of the atomic block that opened ``level``.

        Both are False if no atomic block opened the level. For example,
        ``transaction.savepoint()`` opens a level without an atomic block.

        :param level: an open block of the group's transaction: the outermost one, or a savepoint.
        """

    def add_participant(self, wrapper: Any) -> None:
        """Record that the shard of ``wrapper`` takes part in the group's transaction."""

    def remove_participant(self, wrapper: Any) -> None:
        """Record that the shard of ``wrapper`` no longer takes part in the group's transaction."""

    def record_broken(self, alias: str, broken: bool) -> None:
        """Record whether the transaction of the shard ``alias`` needs a rollback."""

    def record_transaction(self, alias: str, is_open: bool) -> None:
        """Record whether the shard ``alias`` is in a transaction, of the group or of its own."""

    def add_hook(self, wrapper: Any, hook: Any) -> None:
        """Take over a function that was registered with ``on_commit`` on a shard, to run it later.

        :param wrapper: the shard's connection object.
        :param hook: the function's entry in the shard's ``run_on_commit``.
        """

    def forget_hooks(self, sid: object) -> None:
        """Drop the ``on_commit`` functions that were registered inside a savepoint which a shard has
        rolled back.

        :param sid: pair of the shard's alias and the savepoint's id.
        """
