"""The protocols by which the connection objects of a group and of its shards know each other.

In each thread, a group has one connection object for itself (its alias) and one for each shard in
use (its members).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Protocol

from django.db.transaction import Atomic

from sharded_orm.topology.model import Shard


class GroupMember(Protocol):
    """The connection object of one shard, for its group."""

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
    #: The alias under which the topology has the place of this connection.
    topology_alias: str
    #: Used since the group last closed obsolete connections.
    is_active: bool

    # State that only this package may use.
    _generation: int | None
    _in_atomic_block: bool
    _mirrored: list[Atomic]
    _syncing: bool
    _thread_ident: int

    @property
    def commits_with_group(self) -> bool:
        """Whether the end of the group's outermost block commits on this shard."""

    def announce_commit(self) -> None:
        """Announce to the cache what was written; COMMIT follows."""

    def leave_group_levels(self, depth: int, *, commit: bool) -> None:
        """End the levels of the group's transaction from ``depth`` on, innermost first."""

    def is_idle(self) -> bool:
        """Whether closing loses nothing: no open results, no session state, no lease."""

    def is_evictable(self) -> bool:
        """Whether this object can be closed and dropped unnoticed."""

    def holds_session(self) -> bool:
        """Whether closing would lose a transaction or session state. Results to read do not count."""

    def forget_server(self) -> None:
        """Forget cached facts about the server: the next connection may be to another one."""

    def take_settings(self, settings_dict: dict[str, Any], generation: int) -> None:
        """Connect with these settings from now on.

        Called without a connection, or if the settings do not affect it.
        """

    def check_constraints(self, table_names: Any = None) -> None: ...
    def close(self) -> None: ...
    def close_if_unusable_or_obsolete(self) -> None: ...


class Members(Protocol):
    """The connection objects of a group's shards in one thread."""

    wrappers: OrderedDict[str, Any]

    def add(self, wrapper: Any) -> None:
        """Make ``wrapper`` the connection object of its alias in this thread."""

    def record_connect(self, wrapper: Any) -> None:
        """``wrapper`` has connected, and may have to be closed at its ``close_at``."""

    def record_use(self, wrapper: Any) -> None:
        """``wrapper`` is used for the first time since obsolete connections were closed."""


class GroupAlias(Protocol):
    """The connection object of a whole group, for its members."""

    alias: str
    levels: list[Any]
    force_debug_cursor: bool
    queries_log: Any
    execute_wrappers: list[Any]

    @property
    def shards(self) -> Members: ...
    @property
    def needs_rollback(self) -> bool: ...
    def connect(self) -> None: ...
    def validate_no_broken_transaction(self) -> None: ...

    def block_options(self, level: Any) -> tuple[bool, bool]:
        """Return ``durable`` and ``_from_testcase`` of the atomic block that opened ``level``."""

    def add_participant(self, wrapper: Any) -> None:
        """``wrapper`` has opened a level of the group's transaction."""

    def remove_participant(self, wrapper: Any) -> None:
        """``wrapper`` has no level of the group's transaction open any more."""

    def record_broken(self, alias: str, broken: bool) -> None:
        """Record whether the shard ``alias`` needs a rollback."""

    def record_transaction(self, alias: str, is_open: bool) -> None:
        """Record whether the shard ``alias`` is inside a transaction, the group's or its own."""

    def add_hook(self, wrapper: Any, hook: Any) -> None:
        """Take over a hook of ``on_commit``.

        :param hook: its entry in the shard's ``run_on_commit``.
        """

    def forget_hooks(self, sid: object) -> None:
        """Drop the hooks of savepoint ``sid``, to which a shard has rolled back."""
