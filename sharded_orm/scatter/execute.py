"""Sends the statements of a plan to the nodes (database servers).

Different nodes are queried in parallel. The statements for one node are sent one after another.
"""

from __future__ import annotations

import contextvars
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from django.db import DatabaseError, connections
from django.db.backends.utils import CursorWrapper

from sharded_orm import database_settings, runtime
from sharded_orm.backends.features import features_of
from sharded_orm.backends.group import relocation
from sharded_orm.backends.group.moved_shards import PlaceWait, sends_as_django
from sharded_orm.backends.group.shard_connections import connection_of
from sharded_orm.backends.group.test_databases import prepare_shards
from sharded_orm.backends.missing_parts import is_missing_table
from sharded_orm.scatter.failures import (
    Failures,
    concerns_one_shard,
    is_failure,
    is_mismatch,
    is_node_gone,
    is_too_large,
    may_be_the_query,
)
from sharded_orm.scatter.refusals import check_server, refuse

if TYPE_CHECKING:
    from sharded_orm.scatter.comparison import Row
    from sharded_orm.scatter.plan import Branch, ScatterPlan, ShardStatement
    from sharded_orm.topology.model import Shard

# The threads that query nodes. They are kept for the next scatter, because starting a thread takes
# as long as a short query. The maximum is so high that no scatter waits for the threads of another.
_MOST_THREADS = 10_000
_threads = ThreadPoolExecutor(_MOST_THREADS, "scatter")


def _renew_threads() -> None:
    # Give a forked child process a new pool, because the parent's threads do not exist in the child.
    global _threads
    _threads = ThreadPoolExecutor(_MOST_THREADS, "scatter")


os.register_at_fork(after_in_child=_renew_threads)

# The maximum number of shards whose rows are read on demand at the same time. While the rows of a
# shard are read on demand, its connection stays open until the last row is read.
_MOST_OPEN = 100


def _refuse_mismatch(error: DatabaseError) -> Exception:
    return refuse(
        f"columns that differ from shard to shard ({str(error).partition(chr(10))[0]})",
        "create the type or the collation once in the database, outside of the shards' schemas, or"
        " convert the value in the query (Cast, Collate)",
    )


def _node_wrapper(shard: Shard) -> Any:
    """Return a connection object for the node that ``shard`` had when the scatter was planned.

    Call this function in the thread that runs the scatter, because Django stores connection objects
    per thread.
    """
    wrapper: Any = connection_of(shard.alias)
    relocation.follow(wrapper)
    if not wrapper.features.can_union_shards or (
        wrapper.shard == shard and relocation.is_current(wrapper)
    ):
        return wrapper
    # The thread's connection object of this shard is on another node than the plan says, for one of
    # two reasons: an open transaction keeps it on the old node, or the shard has moved since the
    # plan was made. So use a copy that connects to the node of the plan.
    settings = database_settings.settings_as_planned(shard)
    return wrapper if settings is None else relocation.separate_copy(wrapper, settings)


class Executor:
    """Executes the statements of a plan for the calling thread. Not thread-safe.

    :param chunk_size: the number of rows read at a time.
    :param stream: whether to read the rows of unions on demand instead of all at once.
    :param few_rows: whether the statements return few rows. If so, the calling thread may send the
        statements to all nodes and then read the rows of one node after another. The nodes still
        work at the same time, and passing the work to other threads would take longer.
    :raises ScatterError: a shard does not answer, and partial results are not allowed. If they are
        allowed, the error is raised only if no shard has answered and a wrong query may be the
        cause.
    """

    def __init__(
        self,
        plan: ScatterPlan,
        failures: Failures,
        chunk_size: int,
        *,
        stream: bool = False,
        few_rows: bool = False,
    ) -> None:
        self.failures = failures
        self._stream = stream
        self._few_rows = few_rows
        # Maps each statement that was sent, but whose rows were not read yet, to its cursor. If the
        # statement could not be sent, maps it to the error.
        self._sent: dict[ShardStatement, Any] = {}
        self._open: list[Generator[Row, None, None]] = []
        self._chunk_size = chunk_size
        self._statements = plan.statements
        self._unreachable: dict[str, BaseException] = {}
        # A wrong query, for example with a misspelled column, fails on every shard. Then
        # ScatterError is raised even if partial results are allowed, because otherwise the caller
        # would receive an empty result. Three attributes serve this check:
        #
        # - _doubt is an error that a wrong query may have caused, or None.
        # - _answered says whether any shard has answered.
        # - _unsettled is the number of statements that have neither been answered nor failed. Only
        #   the calling thread changes it; the threads that query the nodes may set the other two.
        self._doubt: BaseException | None = None
        self._answered = False
        self._unsettled = len(plan.statements)
        self._sorts_texts = plan.sorts_texts
        if plan.statements:
            group = plan.statements[0].branches[0].shard.group
            self._group = connection_of(group)
            # connect() prepares the connection object of the shard group. If ``databases`` of a
            # test case does not contain the group, connect() raises the error by which Django
            # forbids the query.
            self._group.connect()
            if plan.union:
                self._group.validate_no_broken_transaction()
                prepare_shards(group, (b.shard for s in plan.statements for b in s.branches))
            # Create all connection objects in advance, in the calling thread. Django stores
            # connections per thread, so the threads that query the nodes could not find them.
            self._wrappers: dict[str, Any] = {
                s.node: _node_wrapper(s.branches[0].shard) for s in plan.statements
            }
            self._check_servers()

    def streams(self) -> list[Iterator[Row]]:
        """Return one iterator over rows for each statement, in the order of the statements.

        Each iterator yields its rows in the order of the query. The rows of a union (a statement
        for many shards) are read all at once, unless the executor was created with ``stream=True``.
        """
        rows_of = self._run_all([s for s in self._statements if s.union])
        return [
            iter(rows_of[statement]) if statement.union else self._alias_stream(statement)
            for statement in self._statements
        ]

    def chained(self) -> Iterator[Row]:
        """Yield the rows of all statements, one statement after another.

        So the rows are not in the order of the query.
        """
        for _, rows in self.by_statement():
            yield from rows

    def by_statement(self) -> Iterator[tuple[str, Iterable[Row]]]:
        """Yield a pair for each statement: its node, and its rows.

        The statements are executed in rounds: each round executes one statement on every node
        (database server).
        """
        for wave in self._waves():
            if self._few_rows and self._may_send_ahead(wave):
                yield from self._as_received(wave)
                continue
            rows_of = self._run_all([s for s in wave if s.union])
            for statement in wave:
                rows = rows_of[statement] if statement.union else self._alias_rows(statement)
                yield statement.node, rows

    def close(self) -> None:
        """Close the cursors whose rows are read on demand. Call this if no more rows are needed."""
        for rows in self._open:
            rows.close()
        self._open.clear()

    def _alias_stream(self, statement: ShardStatement) -> Iterator[Row]:
        rows = self._alias_rows(statement)
        if statement.outer.limit is not None or len(self._statements) > _MOST_OPEN:
            # Read all rows now if the query has a LIMIT, because then each shard returns few rows.
            # Also do so if there are many shards: while rows are read on demand, each shard keeps a
            # connection open.
            return iter(list(rows))
        self._open.append(rows)
        return rows

    def _waves(self) -> Iterator[list[ShardStatement]]:
        waiting: dict[str, list[ShardStatement]] = {}
        for statement in self._statements:
            waiting.setdefault(statement.node, []).append(statement)
        while waiting:
            yield [statements.pop(0) for statements in waiting.values()]
            waiting = {node: statements for node, statements in waiting.items() if statements}

    # -- Statements for many shards (unions)

    def _run_all(self, statements: Sequence[ShardStatement]) -> dict[ShardStatement, Iterable[Row]]:
        on_own_connection = [s for s in statements if s.alias is not None]
        by_node: dict[str, list[ShardStatement]] = {}
        for statement in statements:
            if statement.alias is None:
                by_node.setdefault(statement.node, []).append(statement)
        rows_of: dict[ShardStatement, Iterable[Row]] = {}
        nodes = list(by_node.values())
        if len(nodes) + bool(on_own_connection) > 1:
            this_thread, others = (
                (on_own_connection, nodes) if on_own_connection else (nodes[0], nodes[1:])
            )
            futures: list[Future[dict[ShardStatement, Iterable[Row]]]] = []
            try:
                for batch in others:
                    context = contextvars.copy_context()
                    futures.append(_threads.submit(context.run, self._run_node, batch))
                rows_of.update(self._run_node(this_thread))
            finally:
                # Wait for all threads, even after an error: when this method returns, no thread may
                # still use one of the caller's connections.
                wait(futures)
            for future in futures:
                rows_of.update(future.result())
        elif nodes or on_own_connection:
            rows_of.update(self._run_node(on_own_connection or nodes[0]))
        self.failures.check()
        self._settle(len(statements))
        return rows_of

    def _as_received(
        self, statements: Sequence[ShardStatement]
    ) -> Iterator[tuple[str, Iterable[Row]]]:
        """Send statements to their nodes, and yield the node and the rows of each.

        The caller uses the rows of a node while the other nodes still execute their statements.
        """
        with ExitStack() as cursors:
            for statement in statements:
                self._send(statement, cursors)
            try:
                for statement in statements:
                    rows = self._run(statement, statement.branches)
                    # After a failure, still receive the answers of the other nodes, so that the
                    # error names all shards that have failed. But do not yield any more rows.
                    if self.failures.partial or not self.failures.causes:
                        yield statement.node, rows
            finally:
                self._sent.clear()
        self.failures.check()
        self._settle(len(statements))

    def _may_send_ahead(self, statements: Sequence[ShardStatement]) -> bool:
        # Statements are sent ahead if this thread sends them to all nodes before it reads the first
        # answer. Do not do this in three cases:
        # - Something observes each execution: an execute wrapper, the log of queries, or a package
        #   that replaces methods of Django's cursor. send() would bypass it.
        # - POOL limits the sessions. A thread that holds a session of one node would wait for a
        #   session of another node, and two such threads could wait for each other.
        # - A node has no idle session. Opening one takes long if the node is down, so other threads
        #   open the sessions of all nodes at the same time.
        return (
            all(statement.union and statement.alias is None for statement in statements)
            and not self._group.queries_logged
            and not len(self._group.execute_wrappers)
            and sends_as_django(CursorWrapper)
            and all(
                features_of(wrapper).sends_ahead
                and not wrapper.settings_dict.get("POOL")
                and wrapper.node_pool.idle
                for wrapper in self._wrappers.values()
            )
        )

    def _send(self, statement: ShardStatement, cursors: ExitStack) -> None:
        """Send a statement to its node, without waiting for the answer.

        Then :meth:`_run` reads its rows, or raises the error if it could not be sent.

        :param cursors: closes the cursor at its end.
        """
        try:
            with self._group.wrap_database_errors:
                wrapper = self._wrappers[statement.node]
                cursor = cursors.enter_context(wrapper.node_cursor())
                keyed = statement.with_keys() if cursor.writes_digits else None
                if keyed is None:
                    cursor.send(*statement.sql())
                else:
                    sql, select = keyed
                    cursor.send(sql, None, select)
        except DatabaseError as error:
            self._sent[statement] = error
        else:
            self._sent[statement] = cursor

    def _settle(self, statements: int) -> None:
        """Record that this number of statements have ended: each was answered or has failed.

        :raises ScatterError: all statements of the plan have failed, and a wrong query may be the
            cause.
        """
        # The statements may have opened sessions, after the settings of the server have changed.
        self._check_servers()
        self._unsettled -= statements
        if self._doubt is not None and not self._answered and not self._unsettled:
            raise self.failures.error(proven=False) from self._doubt

    def _check_servers(self) -> None:
        for wrapper in self._wrappers.values():
            if wrapper.features.can_union_shards:
                pool = wrapper.node_pool
                check_server(pool.most_rows, sorts_short=pool.sorts_short and self._sorts_texts)

    def _fail(self, branches: Iterable[Branch], error: DatabaseError) -> None:
        if may_be_the_query(error):
            self._doubt = error
        self.failures.add([branch.shard for branch in branches], error)

    def _run_node(
        self, statements: Sequence[ShardStatement]
    ) -> dict[ShardStatement, Iterable[Row]]:
        return {
            statement: self._started(statement)
            if self._stream and statement.alias is None
            else self._run(statement, statement.branches)
            for statement in statements
        }

    def _started(self, statement: ShardStatement) -> Iterable[Row]:
        """Send a statement. Once the server has executed it, return an iterator over its rows.

        If the server refuses the statement, find the shards that fail, and return the rows of the
        other shards.
        """
        rows = self._node_stream(statement)
        try:
            next(rows)
        except DatabaseError:
            return self._run(statement, statement.branches)
        self._answered = True
        self._open.append(rows)
        return rows

    def _node_stream(self, statement: ShardStatement) -> Generator[Any, None, None]:
        """Execute the statement, yield None when the server has executed it, and then the rows.

        Because of the None, the caller learns of an error before it reads the first row.
        """
        sql, params = statement.sql()
        started = False
        try:
            with self._node_cursor(statement, stream=True) as cursor:
                cursor.execute(sql, params)
                started = True
                yield None
                while rows := cursor.fetchmany(self._chunk_size):
                    yield from rows
        except DatabaseError as error:
            if not started or not is_failure(error):
                raise
            self._fail(statement.branches, error)
            self.failures.check()

    def _run(self, statement: ShardStatement, branches: Sequence[Branch]) -> list[Row]:
        if cause := self._unreachable.get(statement.node):
            self.failures.add([branch.shard for branch in branches], cause)
            return []
        if self.failures.hopeless:
            return []
        try:
            if statement in self._sent:
                rows = self._received(self._sent.pop(statement))
            else:
                rows = self.read(statement, *statement.sql(branches))
        except DatabaseError as error:
            if is_mismatch(error) and len(branches) > 1:
                raise _refuse_mismatch(error) from error
            if not is_failure(error):
                raise
            if (concerns_one_shard(error) or is_too_large(error)) and len(branches) > 1:
                middle = len(branches) // 2
                rows = self._run(statement, branches[:middle])
                return [*rows, *self._run(statement, branches[middle:])]
            if is_missing_table(error) and len(branches) == 1:
                try:
                    return self._read_at_new_place(statement, branches[0], error)
                except DatabaseError as exc:
                    error = exc
            if is_node_gone(error):
                self._unreachable[statement.node] = error
            self._fail(branches, error)
            return []
        self._answered = True
        return rows

    def read(self, statement: ShardStatement, sql: str, params: Sequence[Any]) -> list[Row]:
        """Execute ``sql`` on the connection of ``statement``, and return its rows."""
        if statement.alias is not None:
            with connections[statement.alias].cursor() as cursor:
                cursor.execute(sql, params)
                return list(cursor.fetchall())
        with self._node_cursor(statement) as cursor:
            cursor.execute(sql, params)
            return list(cursor.fetchall())

    def _received(self, sent: Any) -> list[Row]:
        """Return the rows that the cursor ``sent`` receives. If ``sent`` is an error, raise it."""
        if isinstance(sent, DatabaseError):
            raise sent
        with self._group.wrap_database_errors:
            sent.receive()
            return list(sent.fetchall())

    def _read_at_new_place(
        self, statement: ShardStatement, branch: Branch, error: DatabaseError
    ) -> list[Row]:
        """Read the rows of a shard that has moved to another node since the plan was made.

        :param error: the exception that says that the shard's tables were not found. It is raised
            again if the shard has not moved.
        """
        shard = branch.shard
        place: Mapping[str, Any] | None = database_settings.settings_as_planned(shard)
        wrapper = self._wrappers[statement.node]
        if place is None or statement.alias is not None:
            # Do not look for a new place in two cases:
            # - The topology does not contain the plan's node any more.
            # - The statement has used the connection of the shard's alias. The cursor of such a
            #   connection has already looked for the moved shard itself.
            raise error
        wait = PlaceWait(
            wrapper,
            lambda: database_settings.settings_as_planned(runtime.shard(shard.group, shard.number)),
        )
        while True:
            place = wait.next_place(place)
            if place is None:
                raise error
            # The same SQL can be used on the new node. It contains the name of the schema, which is
            # the same on every node.
            sql, params = statement.sql([branch])
            copy = relocation.separate_copy(wrapper, place)
            try:
                with self._group.wrap_database_errors, copy.node_cursor() as cursor:
                    cursor.execute(sql, params)
                    rows = list(cursor.fetchall())
            except DatabaseError as exc:
                if not is_missing_table(exc):
                    raise
                continue
            finally:
                copy.close()
            self._answered = True
            return rows

    @contextmanager
    def _node_cursor(self, statement: ShardStatement, **how: bool) -> Iterator[Any]:
        group, wrapper = self._group, self._wrappers[statement.node]
        with group.wrap_database_errors, wrapper.node_cursor(**how) as raw:
            make = group.make_debug_cursor if group.queries_logged else group.make_cursor
            yield make(raw)

    # -- Statements for one shard

    def _alias_rows(self, statement: ShardStatement) -> Generator[Row, None, None]:
        """Yield the rows of a statement for one shard, each with the shard's index appended."""
        (branch,) = statement.branches
        assert statement.alias is not None
        sql, params = statement.sql()
        index = (branch.position,)
        settled = False
        try:
            with connections[statement.alias].chunked_cursor() as cursor:
                cursor.execute(sql, params)
                self._answered = settled = True
                self._settle(1)
                while rows := cursor.fetchmany(self._chunk_size):
                    for row in rows:
                        yield (*row, *index)
        except DatabaseError as error:
            if not is_failure(error):
                raise
            self._fail([branch], error)
            self.failures.check()
            if not settled:
                self._settle(1)
