"""The connection object (wrapper) of a shard.

:class:`ShardConnectionMixin` is the first base class of each backend's ``DatabaseWrapper``. If the
settings of a wrapper have ``SHARD``, it is the wrapper of a shard. The group's wrapper in the same
thread then keeps it and closes it. The shard's wrapper takes part in the group's transactions, and
adds its queries to the group's query log. Any other wrapper behaves as with Django's backend.

:mod:`sharded_orm.backends.write_hooks.commit` handles the end of a transaction that wrote.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any, cast

from django.db import DEFAULT_DB_ALIAS, connections
from django.db.transaction import Atomic, TransactionManagementError
from django.db.utils import DatabaseErrorWrapper
from django.utils.functional import cached_property

from sharded_orm.backends.group import relocation
from sharded_orm.backends.group.contract import GroupAlias
from sharded_orm.backends.group.cursor_methods import open_cursor, opens_as_django
from sharded_orm.backends.group.moved_shards import (
    ShardCursor,
    ShardDebugCursor,
    refuse_hidden_tables,
)
from sharded_orm.backends.group.test_databases import prepare_shards, test_databases
from sharded_orm.backends.group.transaction_memory import knowledge_of
from sharded_orm.backends.query_log import ShardExecuteWrappers, ShardQueryLog
from sharded_orm.backends.shard_database import ShardDatabaseMixin
from sharded_orm.backends.shard_errors import ShardErrorWrapper
from sharded_orm.backends.two_phase.member import TwoPhaseMixin
from sharded_orm.topology.model import Shard

if TYPE_CHECKING:
    from collections.abc import Callable


class ShardConnectionMixin(ShardDatabaseMixin, TwoPhaseMixin):
    """Mixin for a backend's wrapper (connection object), so that it can belong to a shard group.

    As with any Django wrapper, only the thread that owns it may use it. A backend overrides the methods
    of :class:`~sharded_orm.backends.shard_database.ShardDatabaseMixin`.
    """

    shard: Shard | None = None
    group_wrapper: GroupAlias | None = None
    # The number of the topology (the map of shards to nodes) from which settings_dict comes. None
    # for an alias of DATABASES, whose settings never change.
    _generation: int | None = None
    # True while the transaction of a TestCase is being opened on this shard. Its queries are kept
    # out of the query log, because assertNumQueries must not count them.
    _unlogged = False
    # True if this object was used since the group last searched for connections to close.
    is_active = False
    #: The moves of keys that were known shortly before the open transaction took its snapshot (the
    #: state of the rows that it sees) by its first statement. None if nothing was known.
    known_at_snapshot: Any = None
    #: True from the begin of a transaction until its first statement, which takes the snapshot.
    awaits_snapshot = False
    #: True while a statement has failed and its shard's new node is looked up. Prevents recursion.
    looks_for_place = False
    #: The number of open schema editors. If it is not 0, a migration runs on this connection.
    open_editors = 0

    def __init__(self, settings_dict: dict[str, Any], alias: str = DEFAULT_DB_ALIAS) -> None:
        # The atomic blocks that this shard has opened for its group, outermost first. Item i
        # belongs to group_wrapper.levels[i]. The list may be shorter than levels, because the shard
        # opens the missing blocks only at its next use.
        self._mirrored: list[Atomic] = []
        # Reading in_atomic_block or atomic_blocks makes this shard join its group's transaction,
        # except while this is True: for example while a block of _mirrored is entered or left,
        # because Django's Atomic then reads these attributes.
        self._syncing = False
        self._touched: set[str] | None = None
        self._in_atomic_block = False
        self._atomic_blocks: list[Atomic] = []
        self._needs_rollback = False
        super().__init__(settings_dict, alias)
        #: The alias under which this object looks up its current settings in the topology.
        self.topology_alias = alias
        shard = cast("Shard | None", settings_dict.get("SHARD"))
        # Django's _nodb_cursor() makes a connection object from a copy of these settings, under
        # another alias. Such an object must not join the group, so compare the alias.
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
        """Whether this connection object can be closed and dropped without anyone noticing.

        False, for example, if it has a transaction, session state or unread results, or if a test
        captures its queries.
        """
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

    # ##### Hot path: code that runs for every statement #####

    def _report_use(self, group: Any) -> None:
        # Tell the group that this object is in use, so that the group does not drop it as idle.
        try:
            group.shards.wrappers.move_to_end(self.alias)
        except KeyError:
            group.shards.add(self)
        if not self.is_active:
            group.shards.record_use(self)
        if self._touched is not None:
            self._touched.add(self.alias)

    def _prepare_statement(self, group: GroupAlias) -> None:
        """Prepare for a statement of the shard: join the group's transaction if one is open."""
        # If a test case does not allow the group's alias, Django has replaced connect() by a
        # method that raises an error. So call it: the error is then raised even if the test uses
        # only a shard of the group. Otherwise it does almost nothing.
        group.connect()
        if group.levels and len(group.levels) != len(self._mirrored) and not self._syncing:
            self.join_group_transaction()
        self._report_use(group)
        if self.awaits_snapshot and self.shard is not None:
            # The first statement of the transaction takes the snapshot, the state of the rows that
            # it sees. The snapshot must not be older than the knowledge about moving keys.
            self.awaits_snapshot = False
            self.known_at_snapshot = knowledge_of(self.shard)

    def _cursor(self, name: str | None = None) -> Any:
        if self._generation != relocation.generation and self._generation is not None:
            relocation.follow(self)
        group = self.group_wrapper
        if group is not None:
            self._prepare_statement(group)
            if opens_as_django(self, super(ShardConnectionMixin, type(self))):
                return open_cursor(self, name)
        return super()._cursor(name)

    def prepare_database(self) -> None:
        # Overrides the method that "migrate" calls before it looks for tables. While the shard moves,
        # its tables have other names, and "migrate" would create them again.
        super().prepare_database()
        if self.shard is not None:
            refuse_hidden_tables(self)

    def make_cursor(self, cursor: Any) -> Any:
        return super().make_cursor(cursor) if self.shard is None else ShardCursor(cursor, self)

    def make_debug_cursor(self, cursor: Any) -> Any:
        if self.shard is None:
            return super().make_debug_cursor(cursor)
        return ShardDebugCursor(cursor, self)

    @property
    def queries_logged(self) -> bool:
        if self._unlogged:
            return False
        if self.group_wrapper is not None and self.group_wrapper.force_debug_cursor:
            return True
        return super().queries_logged

    def validate_no_broken_transaction(self) -> None:
        if self.needs_rollback:
            super().validate_no_broken_transaction()
        group = self.group_wrapper
        if group is not None and group.levels and not self._syncing:
            group.validate_no_broken_transaction()

    @cached_property
    def wrap_database_errors(self) -> DatabaseErrorWrapper:
        return DatabaseErrorWrapper(self) if self.shard is None else ShardErrorWrapper(self)

    # ##### Connecting #####

    def connect(self) -> None:
        if self.shard is not None and self.connection is not None:
            # The connection exists already. Django's ensure_connection() has read in_atomic_block
            # before this call. That has made the shard join its group's transaction, for which the
            # shard has connected. So nothing is left to do.
            return
        self._conclude_writes()
        group = self.group_wrapper
        if group is not None and self.shard is not None:
            group.connect()
            prepare_shards(self.shard.group, (self.shard,))
            if self._mirrored:
                # The shard had a connection before, and has lost it inside the group's transaction.
                # Its part of this transaction ended with that connection, so forget it. connect()
                # below then resets the state of transactions.
                self._mirrored.clear()
                group.remove_participant(self)
        # Django's connect() reads in_atomic_block. Without _syncing, this would make the shard join
        # its group's transaction at once. But it must join only at its next statement.
        syncing, self._syncing = self._syncing, True
        try:
            super().connect()
        finally:
            self._syncing = syncing
        if group is not None:
            group.shards.record_connect(self)

    def holds_session(self) -> bool:
        """Whether a transaction or session state would be lost if this connection were closed now.

        Unread results do not count.
        """
        return False

    def forget_server(self) -> None:
        """Forget all cached facts about the server, such as its version, because the next
        connection may lead to another server.
        """
        relocation.forget_cached(self)

    def take_settings(self, settings_dict: dict[str, Any], generation: int) -> None:
        """Use ``settings_dict`` for connections from now on.

        See :meth:`~sharded_orm.backends.group.contract.GroupMember.take_settings`.
        """
        self.settings_dict, self._generation = settings_dict, generation
        if self.shard is not None:
            self.shard = settings_dict["SHARD"]

    def close_and_forget(self) -> None:
        """Close the connection, and drop this object from the thread's connections.

        Otherwise a thread that visits thousands of shards keeps as many objects as its limit allows.
        """
        self.close()
        if self.group_wrapper is not None:
            self.group_wrapper.shards.forget(self)

    def close_if_unusable_or_obsolete(self) -> None:
        if self._generation != relocation.generation and self._generation is not None:
            relocation.close_relocated(self)
        super().close_if_unusable_or_obsolete()

    def close(self) -> None:
        # Django's close() reads in_atomic_block. Without _syncing, this would make the shard join
        # its group's transaction. But a connection that is being closed must not join.
        syncing, self._syncing = self._syncing, True
        try:
            super().close()
        finally:
            self._syncing = syncing
            self._record_transaction()

    # ##### Transactions #####
    #
    # Django's Atomic, on_commit and durability checks read in_atomic_block and atomic_blocks. Here,
    # these two make the shard join its group's transaction before they return a value. So a user's
    # block on a shard inside a block on the group is nested in the group's block.

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
        # Django reads this property many times in each transaction. Usually the group has no open
        # block. So test that first, which is cheap.
        group = self.group_wrapper
        if group is not None and group.levels and self._is_behind:
            self.join_group_transaction()
        return self._in_atomic_block

    @in_atomic_block.setter
    def in_atomic_block(self, value: bool) -> None:
        self._in_atomic_block = value
        self._record_transaction()

    def _record_transaction(self) -> None:
        """Report to the group whether this shard is in a transaction. A closed connection is in none."""
        if self.group_wrapper is not None:
            is_connected = self.connection is not None and not self.closed_in_transaction
            is_open = self._in_atomic_block or (not self.autocommit and is_connected)
            self.group_wrapper.record_transaction(self.alias, is_open)

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
        # If the shard has moved, take the settings of the new node first: Django calls this method
        # before it begins a transaction.
        if self._generation != relocation.generation and self._generation is not None:
            relocation.follow(self)
        # select_for_update() calls this method to find out whether it is in a transaction, before
        # it opens a cursor. So let the shard join the group's transaction here.
        if self._is_behind:
            self.join_group_transaction()
        return bool(super().get_autocommit())

    def set_autocommit(self, autocommit: bool, *args: Any, **kwargs: Any) -> None:
        if self._generation != relocation.generation and self._generation is not None:
            relocation.follow(self)
        group = self.group_wrapper
        if group is not None and not autocommit and not self._unlogged:
            self.known_at_snapshot, self.awaits_snapshot = None, True
        super().set_autocommit(autocommit, *args, **kwargs)
        if group is not None:
            self._record_transaction()
            if not self.is_active:
                group.shards.record_use(self)

    def join_group_transaction(self) -> None:
        """Open the atomic blocks on this shard that the group's transaction has and the shard does
        not have yet.

        The shard needs one block for the group's outermost block, and one for each savepoint of the
        group. The blocks that it has opened already are in ``_mirrored``, the outermost first. Those
        of the user on this shard alone are only in Django's stack ``atomic_blocks``. Later blocks of
        the group are opened inside them, because blocks nest.
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
        """End the blocks that this shard has opened for its group: commit them or roll them back.

        :param depth: index, in the group's ``levels``, of the outermost level to end. The levels
            inside it are ended first.
        :param commit: True to commit the transaction or release the savepoints; False to roll them
            back.
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
        """Close the connection, and forget the blocks that this shard has opened for its group.

        Called if a block of the group ends before a block that the user has opened inside it, on
        this shard alone. To end the innermost block would then end the user's block, and might
        commit it. So the connection is closed instead, which rolls back.

        :param depth: index, in ``_mirrored``, of the outermost block to forget.
        """
        self.close()
        while len(self._mirrored) > depth:
            index = self._atomic_blocks.index(self._mirrored.pop())
            del self._atomic_blocks[index]
            # Also drop the savepoint id of the block, or that of the next one if the block was the
            # outermost: that has none, so savepoint_ids[i] belongs to atomic_blocks[i + 1].
            del self.savepoint_ids[max(index - 1, 0)]

    def savepoint_rollback(self, sid: str) -> None:
        self._end_savepoint(super().savepoint_rollback, sid)
        if self.group_wrapper is not None:
            self.group_wrapper.forget_hooks((self.alias, sid))

    def savepoint_commit(self, sid: str) -> None:
        self._end_savepoint(super().savepoint_commit, sid)

    def _end_savepoint(self, end: Callable[[str], None], sid: str) -> None:
        if self._is_behind:
            self.join_group_transaction()
        # Blocks of several shards end one by one. So another shard, whose block is still open, may
        # need a rollback. With _syncing, that does not refuse the end of this shard's savepoint.
        syncing, self._syncing = self._syncing, True
        try:
            end(sid)
        finally:
            self._syncing = syncing

    def on_commit(self, func: Callable[[], object], robust: bool = False) -> None:
        before = len(self.run_on_commit)
        super().on_commit(func, robust)
        # If the shard commits at the end of the group's block, the group runs the functions of all
        # shards after the last commit, in the order in which they were registered.
        if self._is_outermost_mirrored and len(self.run_on_commit) > before:
            assert self.group_wrapper is not None
            self.group_wrapper.add_hook(self, self.run_on_commit[-1])

    @property
    def in_two_phase(self) -> bool:
        """Whether the open transaction is part of a block with ``two_phase=True``.

        Such a transaction can be committed even after its session has ended.
        """
        return self.group_wrapper is not None and self.group_wrapper.coordinator is not None

    @property
    def commits_with_group(self) -> bool:
        """Whether this shard commits at the end of the group's outermost atomic block. False if the
        shard needs a rollback, or if its transaction was begun outside of the group's block.
        """
        return self._is_outermost_mirrored and self.commit_on_exit and not self._needs_rollback

    @property
    def commits_with_others(self) -> bool:
        """Whether the group's open transaction has several shards, which commit one by one."""
        return self.group_wrapper is not None and len(self.group_wrapper.participants) > 1

    @property
    def has_inner_block(self) -> bool:
        """Whether a block of the user on this shard alone, inside that of the group, is still open."""
        return bool(self._mirrored) and self._atomic_blocks[-1:] != self._mirrored[-1:]

    @property
    def _is_outermost_mirrored(self) -> bool:
        return bool(self._mirrored) and self._atomic_blocks[:1] == self._mirrored[:1]

    def run_and_clear_commit_hooks(self) -> None:
        if self._syncing:
            # The group ends the shard's block, and runs the on_commit functions later.
            self.run_on_commit = []
            return
        if self.run_on_commit:
            # The on_commit functions may ask the group, which set_autocommit() tells only afterwards.
            self._record_transaction()
        super().run_and_clear_commit_hooks()

    def copy(self, alias: str | None = None) -> Any:
        """Return another connection object for the same database, which belongs to no shard group."""
        settings_dict = {k: v for k, v in self.settings_dict.items() if k != "SHARD"}
        copy = type(self)(deepcopy(settings_dict), self.alias if alias is None else alias)
        copy.topology_alias, copy._generation = self.topology_alias, self._generation
        return copy
