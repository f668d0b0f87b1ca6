"""Protocols that say what the connection object of a shard group and those of its shards use of
each other.

In each thread, a group's alias has one connection object, and so has each shard that the thread
uses. The connection objects of the shards are called the group's members.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Protocol

from django.db.transaction import Atomic

from sharded_orm.topology.model import Shard


class GroupMember(Protocol):
    """What the connection object of a group uses of the connection object of one of its shards."""

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
    #: True if this object was used since the group last searched for connections to close. The
    #: group then has to look only at the objects that were used.
    is_active: bool

    # Private attributes, declared here because other modules of sharded_orm.backends.group use
    # them. No other package may.
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
        """Whether a statement of the transaction has failed in such a way that its earlier
        statements are lost, too. Either the database has rolled them back already, or it would
        answer COMMIT by a rollback.
        """

    @property
    def has_lost_session(self) -> bool:
        """Whether it is already known that the session of the transaction is lost. COMMIT would
        then raise an error without a round trip to the server.
        """

    @property
    def seems_lost(self) -> bool:
        """Whether the server seems to have closed the session of the transaction. Sends nothing."""

    def reads_as_autocommit(self) -> bool:
        """Whether the transaction has only read rows, so that nothing is lost if it is not
        committed. False if the backend does not know.
        """

    def check_deferred_constraints(self) -> None:
        """Make the database check now the constraints that it would check at COMMIT.

        :raises django.db.IntegrityError: the transaction violates a constraint.
        """

    def announce_commit(self) -> None:
        """Tell the cache that the writes of the transaction are about to be committed, so that it
        gives out no old rows.
        """

    def leave_group_levels(self, depth: int, *, commit: bool) -> None:
        """End the atomic blocks that this shard has opened for its group: commit them or roll them
        back.

        The group's transaction has levels: the outermost block, and a savepoint for each block
        inside it. The shard has opened an atomic block of its own for each level.

        :param depth: index, in the group's ``levels``, of the outermost level to end. The levels
            inside it are ended first.
        :param commit: True to commit the transaction or release the savepoints; False to roll them
            back.
        """

    def is_idle(self) -> bool:
        """Whether the connection can be closed now without any loss.

        True if it has no unread results, no session state, and no session leased from a pool.
        """

    def is_evictable(self) -> bool:
        """Whether this connection object can be closed and dropped now, and replaced by a new one
        at the next use, without anyone noticing.

        False, for example, if it has a transaction, session state or unread results, or if a test
        captures its queries.
        """

    def holds_session(self) -> bool:
        """Whether a transaction or session state would be lost if this connection were closed now.

        Unread results do not count.
        """

    def forget_server(self) -> None:
        """Forget everything that is remembered about the server, such as its version. The next
        connection may be to another server.
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
    """The connection objects of a group's shards in one thread, as these objects use them."""

    wrappers: OrderedDict[str, Any]

    def add(self, wrapper: Any) -> None:
        """Make ``wrapper`` the connection object of its alias in this thread."""

    def forget(self, wrapper: Any) -> None:
        """Drop ``wrapper`` from the thread's connections. Callers that refer to it may still use it."""

    def record_connect(self, wrapper: Any) -> None:
        """Record that ``wrapper`` has connected. Its connection will be closed after the time
        ``wrapper.close_at``, a value of ``time.monotonic()``.
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
        """Take the transaction of one more shard into the group's transaction.

        Called before the first statement of the shard's transaction is sent. If this raises an
        error, the whole transaction is rolled back.

        :param member: the shard's connection object.
        """

    def commit(self, members: Any) -> None:
        """Commit the transactions of ``members`` on all shards or on none.

        If this raises an error, the caller rolls back the transactions that are still open, and raises
        the error.

        :param members: the connection objects of all shards in the transaction.
        """


class GroupAlias(Protocol):
    """What the connection object of a shard uses of the connection object of its group."""

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
        """Return the options ``durable`` and ``_from_testcase`` of the atomic block that opened
        ``level``.

        A shard that joins the transaction passes them on to its own block. Both are False if no
        atomic block opened the level, but for example ``transaction.savepoint()``.

        :param level: an open block of the group's transaction: the outermost one, or a savepoint.
        """

    def add_participant(self, wrapper: Any) -> None:
        """Record that the shard of ``wrapper`` takes part in the group's transaction."""

    def remove_participant(self, wrapper: Any) -> None:
        """Record that the shard of ``wrapper`` no longer takes part in the group's transaction."""

    def record_broken(self, alias: str, broken: bool) -> None:
        """Record whether the transaction of the shard ``alias`` must be rolled back. If so, the
        whole group's transaction must be rolled back.
        """

    def record_transaction(self, alias: str, is_open: bool) -> None:
        """Record whether the shard ``alias`` has an open transaction. It may be a part of the
        group's transaction, or a transaction on this shard alone.
        """

    def add_hook(self, wrapper: Any, hook: Any) -> None:
        """Run a function later that the user has registered with ``on_commit`` on a shard.

        The group runs it after its outermost block, when the last shard has committed.

        :param wrapper: the shard's connection object.
        :param hook: the function's entry in the shard's ``run_on_commit``.
        """

    def forget_hooks(self, sid: object) -> None:
        """Drop the ``on_commit`` functions that were registered inside a savepoint of a shard,
        because the shard has rolled back to this savepoint.

        :param sid: a pair (the shard's alias, the savepoint's id).
        """
