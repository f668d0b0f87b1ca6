"""How the connection object of a shard belongs to that of its group.

:class:`ShardConnectionMixin` is the first base of each backend's ``DatabaseWrapper``. If the
settings of an alias have ``SHARD``, its wrapper (the connection object) belongs to the group's
wrapper in the same thread: it takes part in the group's transactions and writes to the group's
query log, and the group keeps and closes it. Any other alias behaves as with Django's backend.

For the end of transactions that wrote, see :mod:`sharded_orm.backends.write_hooks.commit`.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any, cast

from django.db import DEFAULT_DB_ALIAS, connections
from django.db.transaction import Atomic, TransactionManagementError

from sharded_orm.backends.group import relocation
from sharded_orm.backends.group.contract import GroupAlias
from sharded_orm.backends.group.test_databases import prepare_shards, test_databases
from sharded_orm.backends.query_log import ShardExecuteWrappers, ShardQueryLog
from sharded_orm.backends.shard_database import ShardDatabaseMixin
from sharded_orm.backends.write_hooks.commit import CommitHookMixin
from sharded_orm.topology.model import Shard

if TYPE_CHECKING:
    from collections.abc import Callable


class ShardConnectionMixin(ShardDatabaseMixin, CommitHookMixin):
    """A connection object that can be the member of a group; see the module.

    Only its own thread may use it, as any of Django's. A backend overrides the methods of
    :class:`~sharded_orm.backends.shard_database.ShardDatabaseMixin`.
    """

    shard: Shard | None = None
    group_wrapper: GroupAlias | None = None
    # The generation of the topology that its settings are from, None if they are from none.
    _generation: int | None = None
    # A test case's own transaction is being opened on this shard. Django opens it before the
    # test, so assertNumQueries inside the test must not count it.
    _unlogged = False
    # Used since the group last closed obsolete connections.
    is_active = False
    #: The number of open schema editors; while there is one, a migration runs.
    open_editors = 0

    def __init__(self, settings_dict: dict[str, Any], alias: str = DEFAULT_DB_ALIAS) -> None:
        # The atomic blocks of this shard that mirror the open levels of the group's transaction:
        # for a prefix of group_wrapper.levels, outermost first.
        self._mirrored: list[Atomic] = []
        # A mirrored block is being entered or left: Django's Atomic then uses the state below, which
        # must not join the group's transaction once more.
        self._syncing = False
        self._touched: set[str] | None = None
        self._in_atomic_block = False
        self._atomic_blocks: list[Atomic] = []
        self._needs_rollback = False
        super().__init__(settings_dict, alias)
        #: The alias under which the topology has the place of this connection.
        self.topology_alias = alias
        shard = cast("Shard | None", settings_dict.get("SHARD"))
        # Objects for another purpose have a copy of the settings (_nodb_cursor).
        if shard is not None and alias == shard.alias:
            self._become_member(shard)

    def _become_member(self, shard: Shard) -> None:
        group = cast("GroupAlias", connections[shard.group])
        self.shard = shard
        self.group_wrapper = group
        self._generation = self.settings_dict.get("GENERATION")
        self.queries_log = ShardQueryLog(self.queries_limit, lambda: group.queries_log)
        self.execute_wrappers = ShardExecuteWrappers(lambda: group.execute_wrappers)
        if tests := test_databases.get(shard.group):
            self._touched = tests.touched
        group.shards.add(self)

    def is_evictable(self) -> bool:
        """Whether this object can be closed and dropped unnoticed."""
        return not (
            self._in_atomic_block
            or self._mirrored
            or self.force_debug_cursor
            or len(self.execute_wrappers)
            or self._thread_sharing_count
            or (self.connection is not None and not self._is_clean())
        )

    def _is_clean(self) -> bool:
        return self.autocommit == self.settings_dict["AUTOCOMMIT"] and self.is_idle()

    # ##### Hot path: every statement passes here #####

    def _cursor(self, name: str | None = None) -> Any:
        if self._generation != relocation.generation and self._generation is not None:
            relocation.follow(self)
        group = self.group_wrapper
        if group is not None:
            # Does nothing, unless a test case that does not allow the group's alias has replaced
            # the method: then it raises for all shards of the group.
            group.connect()
            if group.levels and len(group.levels) != len(self._mirrored) and not self._syncing:
                self.join_group_transaction()
            try:
                group.shards.wrappers.move_to_end(self.alias)
            except KeyError:
                group.shards.add(self)
            if not self.is_active:
                group.shards.record_use(self)
            if self._touched is not None:
                self._touched.add(self.alias)
        return super()._cursor(name)

    @property
    def queries_logged(self) -> bool:
        if self._unlogged:
            return False
        if self.group_wrapper is not None and self.group_wrapper.force_debug_cursor:
            return True
        return super().queries_logged

    def validate_no_broken_transaction(self) -> None:
        super().validate_no_broken_transaction()
        group = self.group_wrapper
        if group is not None and group.levels and group.needs_rollback:
            group.validate_no_broken_transaction()

    # ##### Connecting #####

    def connect(self) -> None:
        self._conclude_writes()
        group = self.group_wrapper
        if group is not None and self.shard is not None:
            group.connect()
            prepare_shards(self.shard.group, (self.shard,))
            if self._mirrored:
                # connect() forgets an open transaction.
                self._mirrored.clear()
                group.remove_participant(self)
        # connect() reads the state of transactions and must not join one; the next statement does.
        syncing, self._syncing = self._syncing, True
        try:
            super().connect()
        finally:
            self._syncing = syncing
        if group is not None:
            group.shards.record_connect(self)

    def holds_session(self) -> bool:
        """Whether closing would lose a transaction or session state. Results to read do not count."""
        return False

    def forget_server(self) -> None:
        """Forget cached facts about the server: the next connection may be to another one."""
        relocation.forget_cached(self)

    def take_settings(self, settings_dict: dict[str, Any], generation: int) -> None:
        """Connect with these settings from now on.

        Called without a connection, or if the settings do not affect it.
        """
        self.settings_dict, self._generation = settings_dict, generation
        if self.shard is not None:
            self.shard = settings_dict["SHARD"]

    def close_if_unusable_or_obsolete(self) -> None:
        if self._generation != relocation.generation and self._generation is not None:
            relocation.close_relocated(self)
        super().close_if_unusable_or_obsolete()

    def close(self) -> None:
        # close() reads the state of transactions and must not join one.
        syncing, self._syncing = self._syncing, True
        try:
            super().close()
        finally:
            self._syncing = syncing

    # ##### Transactions #####
    #
    # The attributes that Django's Atomic, on_commit and durability checks read first join the
    # group's transaction. So an atomic block of the user on a shard nests inside the group's block
    # around it.

    @property
    def _is_behind(self) -> bool:
        group = self.group_wrapper
        return (
            group is not None
            and bool(group.levels)
            and len(group.levels) != len(self._mirrored)
            and not self._syncing
        )

    @property
    def in_atomic_block(self) -> bool:
        if self._is_behind:
            self.join_group_transaction()
        return self._in_atomic_block

    @in_atomic_block.setter
    def in_atomic_block(self, value: bool) -> None:
        self._in_atomic_block = value
        if self.group_wrapper is not None:
            self.group_wrapper.record_transaction(self.alias, value or not self.autocommit)

    @property
    def atomic_blocks(self) -> list[Atomic]:
        if self._is_behind:
            self.join_group_transaction()
        return self._atomic_blocks

    @atomic_blocks.setter
    def atomic_blocks(self, value: list[Atomic]) -> None:
        self._atomic_blocks = value

    @property
    def needs_rollback(self) -> bool:
        return self._needs_rollback

    @needs_rollback.setter
    def needs_rollback(self, value: bool) -> None:
        self._needs_rollback = value
        if self._mirrored and self.group_wrapper is not None:
            self.group_wrapper.record_broken(self.alias, value)

    def get_autocommit(self) -> bool:
        # A transaction must not begin where the shard was before.
        if self._generation != relocation.generation and self._generation is not None:
            relocation.follow(self)
        # select_for_update asks this before there is a cursor.
        if self._is_behind:
            self.join_group_transaction()
        return bool(super().get_autocommit())

    def set_autocommit(self, autocommit: bool, *args: Any, **kwargs: Any) -> None:
        if self._generation != relocation.generation and self._generation is not None:
            relocation.follow(self)
        super().set_autocommit(autocommit, *args, **kwargs)
        group = self.group_wrapper
        if group is not None:
            group.record_transaction(self.alias, self._in_atomic_block or not autocommit)
            if not self.is_active:
                group.shards.record_use(self)

    def join_group_transaction(self) -> None:
        """Open the levels of the group's transaction that this shard has not opened yet.

        A level is an open atomic block of the group. Invariant: ``_mirrored`` has a block for each
        of the first levels, and these blocks are on the stack of atomic blocks in the same order.
        ``with`` blocks nest, so a block of the user is above or below a level as in the program.
        """
        group = self.group_wrapper
        assert group is not None
        group.validate_no_broken_transaction()
        if connections[self.alias] is not self:
            raise TransactionManagementError(
                f"This connection object of {self.alias!r} was replaced after it had been idle;"
                f" inside atomic(using={group.alias!r}), use connections[{self.alias!r}]."
            )
        self._syncing = True
        try:
            for level in group.levels[len(self._mirrored) :]:
                durable, from_testcase = group.block_options(level)
                block: Any = Atomic(self.alias, savepoint=True, durable=durable)
                block._from_testcase = from_testcase
                self._unlogged = from_testcase
                block.__enter__()
                self._mirrored.append(block)
                group.add_participant(self)
        finally:
            self._syncing = self._unlogged = False

    def leave_group_levels(self, depth: int, *, commit: bool) -> None:
        """End the levels of the group's transaction from ``depth`` on, innermost first.

        :raises django.db.Error: the database refuses to commit or to release a savepoint; the level
            is then rolled back, as by Django's atomic().
        """
        group = self.group_wrapper
        assert group is not None
        self._syncing = True
        try:
            while len(self._mirrored) > depth:
                block = self._mirrored[-1]
                if self._atomic_blocks and self._atomic_blocks[-1] is not block:
                    self._drop_levels(depth)
                    raise TransactionManagementError(
                        f"A block of {group.alias!r} ends while a block on its shard"
                        f" {self.alias!r} that began inside it is still open; the shard's"
                        " transaction was rolled back."
                    )
                if not commit:
                    self._needs_rollback = True
                self._mirrored.pop()
                block.__exit__(None, None, None)
        finally:
            self._syncing = False
            if self._mirrored:
                group.record_broken(self.alias, self._needs_rollback)
            else:
                group.remove_participant(self)

    def _drop_levels(self, depth: int) -> None:
        """End levels below a block that is still open: close the connection, and forget them.

        The block on top ends later. Leaving a level would end that block instead, and might commit.
        """
        self.close()
        while len(self._mirrored) > depth:
            index = self._atomic_blocks.index(self._mirrored.pop())
            del self._atomic_blocks[index]
            # The outermost block has no savepoint; the next one takes its role.
            del self.savepoint_ids[max(index - 1, 0)]

    def savepoint_rollback(self, sid: str) -> None:
        super().savepoint_rollback(sid)
        if self.group_wrapper is not None:
            self.group_wrapper.forget_hooks((self.alias, sid))

    def on_commit(self, func: Callable[[], object], robust: bool = False) -> None:
        before = len(self.run_on_commit)
        super().on_commit(func, robust)
        # If the transaction ends with the group's, the hook runs after the commit of the last
        # shard; hooks of all shards run in the order of their registration.
        if self._is_outermost_mirrored and len(self.run_on_commit) > before:
            assert self.group_wrapper is not None
            self.group_wrapper.add_hook(self, self.run_on_commit[-1])

    @property
    def commits_with_group(self) -> bool:
        """Whether the end of the group's outermost block commits on this shard."""
        return self._is_outermost_mirrored and self.commit_on_exit and not self._needs_rollback

    @property
    def _is_outermost_mirrored(self) -> bool:
        return bool(self._mirrored) and self._atomic_blocks[:1] == self._mirrored[:1]

    def run_and_clear_commit_hooks(self) -> None:
        if self._syncing:
            self.run_on_commit = []  # The group has them.
            return
        super().run_and_clear_commit_hooks()

    def copy(self, alias: str | None = None) -> Any:
        """Return another connection object for the same database, outside of the group."""
        settings_dict = {k: v for k, v in self.settings_dict.items() if k != "SHARD"}
        copy = type(self)(deepcopy(settings_dict), self.alias if alias is None else alias)
        copy.topology_alias, copy._generation = self.topology_alias, self._generation
        return copy
