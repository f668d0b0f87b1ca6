"""The connection object of a shard, and its ties to the connection object of the shard group.

:class:`ShardConnectionMixin` is the first base class of each backend's ``DatabaseWrapper``. If an
alias has ``SHARD`` in its settings, its connection object (wrapper) belongs to the group's wrapper in
the same thread. It takes part in the group's transactions and writes to the group's query log, and
the group keeps and closes it. Any other alias behaves as with Django's backend.

For what happens when a transaction that wrote ends, see
:mod:`sharded_orm.backends.write_hooks.commit`.
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
    """A connection object that can belong to a shard group; see the module's docstring.

    As with any Django connection object, only the thread that owns it may use it. A backend overrides
    the methods of :class:`~sharded_orm.backends.shard_database.ShardDatabaseMixin`.
    """

    shard: Shard | None = None
    group_wrapper: GroupAlias | None = None
    # Number of the topology that settings_dict is from; None if it is not from a topology.
    _generation: int | None = None
    # Whether statements stay out of the query log now, as a TestCase's transaction is being opened on
    # this shard. Without shards, Django opens it before the test, so assertNumQueries must not count it.
    _unlogged = False
    # Whether this object was used since the group last closed obsolete connections.
    is_active = False
    #: Number of open schema editors. If it is not 0, a migration is running.
    open_editors = 0

    def __init__(self, settings_dict: dict[str, Any], alias: str = DEFAULT_DB_ALIAS) -> None:
        # The atomic blocks that this shard has opened for the group's open blocks, outermost first:
        # item i is for group_wrapper.levels[i]. Inner blocks of the group may be missing still.
        self._mirrored: list[Atomic] = []
        # Whether a block of _mirrored is being entered or left. Django's Atomic then reads attributes such as
        # in_atomic_block, which must not join the group's transaction once more.
        self._syncing = False
        self._touched: set[str] | None = None
        self._in_atomic_block = False
        self._atomic_blocks: list[Atomic] = []
        self._needs_rollback = False
        super().__init__(settings_dict, alias)
        #: The alias by which the current connection settings are looked up in the topology.
        self.topology_alias = alias
        shard = cast("Shard | None", settings_dict.get("SHARD"))
        # Django makes further connection objects with a copy of these settings (_nodb_cursor). They
        # have another alias and do not belong to the group.
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
        """Whether this object can be closed and dropped without any effect on its users."""
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
            # Usually does nothing. But a test case that does not allow the group's alias replaces this
            # method by one that raises: that forbids all shards of the group.
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
                # connect() below resets the state of transactions, so this shard leaves the group's
                # transaction, which was open on the earlier connection.
                self._mirrored.clear()
                group.remove_participant(self)
        # connect() reads attributes such as in_atomic_block, which must not join the group's transaction
        # now. The next statement joins it.
        syncing, self._syncing = self._syncing, True
        try:
            super().connect()
        finally:
            self._syncing = syncing
        if group is not None:
            group.shards.record_connect(self)

    def holds_session(self) -> bool:
        """Whether closing would lose a transaction or session state. Unread results do not count."""
        return False

    def forget_server(self) -> None:
        """Forget cached facts about the server, as the next connection may be to another server."""
        relocation.forget_cached(self)

    def take_settings(self, settings_dict: dict[str, Any], generation: int) -> None:
        """Use these settings for connections from now on.

        Called only if there is no open connection, or if the new settings do not affect it.

        :param generation: number of the topology that the settings are from.
        """
        self.settings_dict, self._generation = settings_dict, generation
        if self.shard is not None:
            self.shard = settings_dict["SHARD"]

    def close_if_unusable_or_obsolete(self) -> None:
        if self._generation != relocation.generation and self._generation is not None:
            relocation.close_relocated(self)
        super().close_if_unusable_or_obsolete()

    def close(self) -> None:
        # close() reads attributes such as in_atomic_block, which must not join the group's transaction.
        syncing, self._syncing = self._syncing, True
        try:
            super().close()
        finally:
            self._syncing = syncing

    # ##### Transactions #####
    #
    # Django's Atomic, on_commit and durability checks read in_atomic_block and the like. Each of these
    # properties joins the group's transaction before it returns a value. So if a user opens an atomic
    # block on a shard inside one on the group, the shard's block is nested in the group's.

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
        # Move to the shard's current node first: a transaction must not begin on the old one.
        if self._generation != relocation.generation and self._generation is not None:
            relocation.follow(self)
        # select_for_update calls this method before it opens a cursor.
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
        """Open an atomic block on this shard for each block of the group that it has not joined yet.

        An open atomic block of the group is called a level. Invariant: ``_mirrored`` has the shard's
        blocks for the first levels, and the stack ``atomic_blocks`` has these blocks in the same
        order. As ``with`` blocks nest, a user's own block on the shard is at the right depth between
        them.
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
        """End the levels of the group's transaction from index ``depth`` on, innermost first.

        A level is an open atomic block of the group: the outermost one, or a savepoint.

        :param commit: whether to commit or release the levels; otherwise they are rolled back.
        :raises django.db.Error: the database refuses to commit or to release a savepoint. The level
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
        """End the levels from index ``depth`` on while a user's block inside them is still open.

        Closes the connection and forgets the levels. Leaving them would end the user's block instead,
        and might commit. The user's block ends later.
        """
        self.close()
        while len(self._mirrored) > depth:
            index = self._atomic_blocks.index(self._mirrored.pop())
            del self._atomic_blocks[index]
            # savepoint_ids has no entry for the outermost block, so that of another block is one index
            # lower. If the outermost block is dropped, the next block becomes the outermost.
            del self.savepoint_ids[max(index - 1, 0)]

    def savepoint_rollback(self, sid: str) -> None:
        super().savepoint_rollback(sid)
        if self.group_wrapper is not None:
            self.group_wrapper.forget_hooks((self.alias, sid))

    def on_commit(self, func: Callable[[], object], robust: bool = False) -> None:
        before = len(self.run_on_commit)
        super().on_commit(func, robust)
        # If the shard's transaction ends with the group's, hand the function over to the group. It runs
        # after the last shard has committed; functions of all shards run in the order in which they were
        # registered.
        if self._is_outermost_mirrored and len(self.run_on_commit) > before:
            assert self.group_wrapper is not None
            self.group_wrapper.add_hook(self, self.run_on_commit[-1])

    @property
    def commits_with_group(self) -> bool:
        """Whether this shard commits when the group's outermost atomic block ends."""
        return self._is_outermost_mirrored and self.commit_on_exit and not self._needs_rollback

    @property
    def _is_outermost_mirrored(self) -> bool:
        return bool(self._mirrored) and self._atomic_blocks[:1] == self._mirrored[:1]

    def run_and_clear_commit_hooks(self) -> None:
        if self._syncing:
            self.run_on_commit = []  # The group has these functions, and runs them.
            return
        super().run_and_clear_commit_hooks()

    def copy(self, alias: str | None = None) -> Any:
        """Return another connection object for the same database, which belongs to no group."""
        settings_dict = {k: v for k, v in self.settings_dict.items() if k != "SHARD"}
        copy = type(self)(deepcopy(settings_dict), self.alias if alias is None else alias)
        copy.topology_alias, copy._generation = self.topology_alias, self._generation
        return copy
