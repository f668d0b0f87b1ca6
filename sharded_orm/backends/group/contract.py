"""What the connection objects of a group and of its shards may ask of each other.

The group's object and its members' are in one thread and call each other all the time. Each
knows the other by one of these protocols only.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Protocol

from django.db.transaction import Atomic

from sharded_orm.topology.model import Shard


class GroupMember(Protocol):
    """The connection object of one shard, as its group sees it."""

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
    #: The alias whose place in the topology the connection is at.
    follows: str
    #: Used since the group last closed what is obsolete.
    is_active: bool

    # Of the state that only code of this package may look at.
    _generation: int | None
    _in_atomic_block: bool
    _mirrored: list[Atomic]
    _syncing: bool
    _thread_ident: int

    @property
    def commits_with_group(self) -> bool:
        """Whether the end of the group's outermost block commits on this shard."""

    def announce_commit(self) -> None:
        """Tell of what was written; the next thing to happen is COMMIT."""

    def leave_group_levels(self, depth: int, *, commit: bool) -> None:
        """End the group's levels below ``depth`` (0: all) on this shard, innermost first."""

    def is_idle(self) -> bool:
        """Whether closing loses nothing: no open results, no session state, no lease."""

    def is_evictable(self) -> bool:
        """Whether nobody would notice that this object was closed and dropped."""

    def holds_session(self) -> bool:
        """Whether closing would lose what was begun on the session, apart from open results."""

    def forget_server(self) -> None:
        """The next connection is to another place; what is known of the server may not hold."""

    def take_settings(self, settings_dict: dict[str, Any], generation: int) -> None:
        """Connect with other settings from now on; there is no connection, or they are alike."""

    def check_constraints(self, table_names: Any = None) -> None: ...
    def close(self) -> None: ...
    def close_if_unusable_or_obsolete(self) -> None: ...


class Members(Protocol):
    """The connection objects of a group's shards in one thread."""

    wrappers: OrderedDict[str, Any]

    def adopt(self, wrapper: Any) -> None:
        """Count ``wrapper`` among those of the thread."""

    def opened(self, wrapper: Any) -> None:
        """``wrapper`` has connected; it may have to be closed at its ``close_at``."""

    def used(self, wrapper: Any) -> None:
        """``wrapper`` is used for the first time since the obsolete ones were closed."""


class GroupAlias(Protocol):
    """The connection object that stands for a whole group, as its members see it."""

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
        """``durable`` and ``_from_testcase`` of the atomic block that made ``level``."""

    def joined(self, wrapper: Any) -> None:
        """``wrapper`` has opened levels of the group's transaction."""

    def left(self, wrapper: Any) -> None:
        """``wrapper`` has none of the group's levels open any more."""

    def note_broken(self, alias: str, broken: bool) -> None:
        """Whether the shard ``alias`` needs a rollback."""

    def note_transaction(self, alias: str, is_open: bool) -> None:
        """Whether the shard ``alias`` is inside a transaction of any kind."""

    def add_hook(self, wrapper: Any, hook: Any) -> None:
        """Take over a hook of ``on_commit``; ``hook`` is its entry in ``run_on_commit``."""

    def forget_hooks(self, sid: object) -> None:
        """A shard rolled back to its savepoint ``sid``."""
