"""Protocols that say which attributes and methods the connection object of a shard group and the
connection objects of its shards use of each other.

In each thread, a group's alias has one connection object, and so has each shard that the thread
uses. The connection objects of the shards are called the group's members.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Protocol

from django.db.transaction import Atomic

from sharded_orm.topology.model import Shard


class GroupMember(Protocol):
    """The attributes and methods of a shard's connection object that the connection object of its
    group uses.
    """

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
    #: True if this object was used since the group last searched for connections to close. Each
    #: search looks at all active objects. It looks at an inactive one only if the connection of the
    #: object may be too old.
    is_active: bool

    # Private attributes, declared here because other modules of sharded_orm.backends.group use
    # them. Modules of other packages may not.
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
        """Whether a statement of the transaction has failed in such a way that the earlier
        statements of the transaction are lost. Either the database has rolled them back already, or
        it would answer COMMIT by a rollback.
        """

    @property
    def has_lost_session(self) -> bool:
        """Whether it is already known that the session of the transaction is lost. COMMIT would
        then raise an error at once, and send nothing to the server.
        """

    @property
    def seems_lost(self) -> bool:
        """Whether the server seems to have closed the session of the transaction. Sends nothing."""

    def reads_as_autocommit(self) -> bool:
        """Whether the transaction has only read rows, so that nothing is lost if it is not
        committed. False if the backend does not know.
        """

    def check_deferred_constraints(self) -> None:
        """Make the database check now those constraints that it would otherwise check at COMMIT.

        :raises django.db.IntegrityError: the transaction violates a constraint.
        """

    def announce_commit(self) -> None:
        """Tell the cache that the transaction is about to commit its writes, so that the cache
        gives out no old versions of the written rows.
        """

    def leave_group_levels(self, depth: int, *, commit: bool) -> None:
        """End the atomic blocks that this shard has opened for its group: commit them or roll them
        back.

        The group's transaction has levels: the outermost block, and a savepoint for each block
        inside it. The shard has opened an atomic block of its own for each level.

        :param depth: an index in the group's ``levels``. The blocks of this level and of all levels
            inside it are ended, the innermost first.
        :param commit: True to commit the transaction or release the savepoints; False to roll them
            back.
        """

    def is_idle(self) -> bool:
        """Whether nothing is lost if the connection is closed now.

        True if it has no unread results, no session state, and no session leased from a pool.
        """

    def is_evictable(self) -> bool:
        """Whether this connection object can be closed and dropped now without anyone noticing. At
        the next use of the alias, a new object takes its place.

        False, for example, if it has a transaction, session state or unread results, or if a test
        captures its queries.
        """

    def holds_session(self) -> bool:
        """Whether a transaction or session state would be lost if this connection were closed now.

        Unread results would also be lost, but are not considered here.
        """

    def forget_server(self) -> None:
        """Forget everything that is remembered about the server, such as its version, because the
        next connection may be to another server.
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
    """The collection of the connection objects of a group's shards in one thread. This protocol has
    the methods of the collection that the connection objects themselves call.
    """

    wrappers: OrderedDict[str, Any]

    def add(self, wrapper: Any) -> None:
        """Make ``wrapper`` the connection object of its alias in this thread."""

    def forget(self, wrapper: Any) -> None:
        """Drop ``wrapper`` from the thread's connections. Callers that refer to it may still use it."""

    def record_connect(self, wrapper: Any) -> None:
        """Record that ``wrapper`` has connected. Its connection is too old from
        ``wrapper.close_at`` on, a value of ``time.monotonic()``. When the group later searches for
        connections to close, it finds the connection.
        """

    def record_use(self, wrapper: Any) -> None:
        """Record that ``wrapper`` was used, so that the group looks at it when it next searches for
        connections to close.
        """


class GroupCoordinator(Protocol):
    """Commits the transactions of a group's shards together, for example in two phases. A group
    without a coordinator commits one shard after the other.
    """

    def join(self, member: Any) -> None:
        """Make the transaction of one more shard a part of the group's transaction.

        Called before the first statement of the shard's transaction is sent. If this method raises
        an error, the whole transaction is rolled back.

        :param member: the shard's connection object.
        """

    def commit(self, members: Any) -> None:
        """Commit the transactions of ``members`` on all shards or on none.

        If this method raises an error, the caller rolls back the transactions that are still open,
        and raises the error again.

        :param members: the connection objects of all shards in the transaction.
        """


class GroupAlias(Protocol):
    """The attributes and methods of a group's connection object that the connection objects of its
    shards use.
    """

    alias: str
    levels: list[Any]
    force_debug_cursor: bool
    queries_log: Any
    execute_wrappers: list[Any]
    coordinator: GroupCoordinator | None
    #: Maps the alias of each shard that takes part in the group's transaction to its connection
    #: object.
    participants: dict[str, Any]

    @property
    def shards(self) -> Members: ...
    @property
    def needs_rollback(self) -> bool: ...
    def connect(self) -> None: ...
    def validate_no_broken_transaction(self) -> None: ...

    def block_options(self, level: Any) -> tuple[bool, bool]:
        """Return the options ``durable`` and ``_from_testcase`` of the atomic block that opened
        ``level``.

        A shard that joins the group's transaction opens a block of its own with the same options.
        Both options are False if ``level`` was not opened by an atomic block, but for example by
        ``transaction.savepoint()``.

        :param level: an open block of the group's transaction: the outermost one, or a savepoint.
        """

    def add_participant(self, wrapper: Any) -> None:
        """Record that the shard of ``wrapper`` takes part in the group's transaction."""

    def remove_participant(self, wrapper: Any) -> None:
        """Record that the shard of ``wrapper`` no longer takes part in the group's transaction."""

    def record_broken(self, alias: str, broken: bool) -> None:
        """Record whether the transaction of the shard ``alias`` must be rolled back. If one shard's
        transaction must be, the whole group's transaction must be rolled back.
        """

    def record_transaction(self, alias: str, is_open: bool) -> None:
        """Record whether the shard ``alias`` has an open transaction. It may be a part of the
        group's transaction, or a transaction on this shard alone.
        """

    def add_hook(self, wrapper: Any, hook: Any) -> None:
        """Register a function that the user has passed to ``on_commit`` on a shard.

        The group calls the function after its outermost block, when the last shard has committed.

        :param wrapper: the shard's connection object.
        :param hook: the function's entry in the shard's ``run_on_commit``.
        """

    def forget_hooks(self, sid: object) -> None:
        """Drop ``on_commit`` functions, because a shard has rolled back to a savepoint. These are
        the functions that were registered on the shard inside the savepoint.

        :param sid: a pair (the shard's alias, the savepoint's id).
        """
