"""Sends the statements of a plan: nodes in parallel, each its batches in turn."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from django.db import DatabaseError, InterfaceError, OperationalError, connections

from sharded_orm.backends.shared import prepare_shards
from sharded_orm.exceptions import ScatterError

if TYPE_CHECKING:
    from sharded_orm.scatter.keys import Row
    from sharded_orm.scatter.plan import Branch, Plan, Statement

# MySQL errors that concern single shards of a batch: their schema, table or column, our
# rights on them. The batch is halved until the shards that fail are known.
_ONE_SHARD = frozenset({1044, 1049, 1054, 1109, 1142, 1143, 1146, 1932})
# Errors of the connection: the other batches of the node are not tried.
_NODE_GONE = frozenset({1040, 1045, 1053, 1129, 1130, 1203})
# Errors of the server's state, not of the statement: full, locked, killed, read-only.
_STATE = frozenset(
    {1020, 1021, 1030, 1034, 1037, 1038, 1041, 1135, 1194, 1195, 1205, 1213, 1290, 1317, 1836, 1927}
    | {1969, 3024}
)
# A scatter that will fail anyway stops to look for the shards after so many.
_ENOUGH = 8


class Failures:
    """The shards that did not answer, in one scatter.

    Without ``partial`` the first failure ends the scatter with :exc:`ScatterError`.
    With it, ``report`` gets one such error when the scatter is over.
    """

    def __init__(
        self,
        asked: int,
        *,
        partial: bool = False,
        report: Callable[[ScatterError], None] | None = None,
    ) -> None:
        self.asked = asked
        self.partial = partial
        self.causes: dict[str, BaseException] = {}
        self._report = report

    def add(self, branches: Sequence[Branch], cause: BaseException) -> None:
        for branch in branches:
            self.causes[branch.shard.alias] = cause

    def check(self) -> None:
        """Raise what was added, unless partial results are wanted."""
        if self.causes and not self.partial:
            raise self.error() from next(iter(self.causes.values()))

    @property
    def hopeless(self) -> bool:
        return not self.partial and len(self.causes) >= _ENOUGH

    def error(self) -> ScatterError:
        return ScatterError(self.causes, self.asked)

    def finish(self) -> None:
        if self.causes and self.partial and self._report is not None:
            self._report(self.error())


def is_failure(error: Exception) -> bool:
    """Whether the shard did not answer, rather than the query being wrong."""
    code = _code(error)
    if not isinstance(code, int):
        return isinstance(error, OperationalError | InterfaceError)
    return _is_node_gone(error) or code in _ONE_SHARD or code in _STATE or code == 0


def _is_node_gone(error: BaseException) -> bool:
    code = _code(error)
    # The client library's own errors are numbered from 2000.
    return isinstance(code, int) and (code in _NODE_GONE or 2000 <= code < 3000)


def _code(error: BaseException) -> Any:
    return error.args[0] if error.args else None


class Executor:
    """Runs statements for the calling thread. Not to be shared."""

    def __init__(self, plan: Plan, failures: Failures, chunk_size: int) -> None:
        self._failures = failures
        self._chunk_size = chunk_size
        self._statements = plan.statements
        self._gone: dict[str, BaseException] = {}
        if plan.statements:
            group = plan.statements[0].branches[0].shard.group
            self._group = connections[group]
            # A test case that did not allow the group makes this raise.
            self._group.connect()
            if plan.union:
                self._group.validate_no_broken_transaction()
                prepare_shards(group, [b.shard for s in plan.statements for b in s.branches])
            # The node's wrapper, made here: workers must not touch the thread's connections.
            self._wrappers = {
                s.node: connections[s.branches[0].shard.alias] for s in plan.statements
            }

    def streams(self) -> list[Iterator[Row]]:
        """The rows of each statement. Those of unions have been read, others are open."""
        stored = [s for s in self._statements if s.union]
        found = self._run_all(stored)
        return [
            iter(found[statement]) if statement.union else self._alias_rows(statement)
            for statement in self._statements
        ]

    def chained(self) -> Iterator[Row]:
        """All rows, in the order of the shards, a batch of every node at a time."""
        for wave in self._waves():
            found = self._run_all([s for s in wave if s.union])
            for statement in wave:
                yield from found[statement] if statement.union else self._alias_rows(statement)

    def _waves(self) -> Iterator[list[Statement]]:
        waiting: dict[str, list[Statement]] = {}
        for statement in self._statements:
            waiting.setdefault(statement.node, []).append(statement)
        while waiting:
            yield [statements.pop(0) for statements in waiting.values()]
            waiting = {node: left for node, left in waiting.items() if left}

    # -- unions

    def _run_all(self, statements: Sequence[Statement]) -> dict[Statement, list[Row]]:
        own = [s for s in statements if s.alias is not None]
        by_node: dict[str, list[Statement]] = {}
        for statement in statements:
            if statement.alias is None:
                by_node.setdefault(statement.node, []).append(statement)
        found: dict[Statement, list[Row]] = {}
        nodes = list(by_node.values())
        if len(nodes) + bool(own) > 1:
            here, others = (own, nodes) if own else (nodes[0], nodes[1:])
            with ThreadPoolExecutor(len(others), "scatter") as pool:
                futures: list[Future[dict[Statement, list[Row]]]] = [
                    pool.submit(contextvars.copy_context().run, self._run_node, batch)
                    for batch in others
                ]
                found.update(self._run_node(here))
                for future in futures:
                    found.update(future.result())
        elif nodes or own:
            found.update(self._run_node(own or nodes[0]))
        self._failures.check()
        return found

    def _run_node(self, statements: Sequence[Statement]) -> dict[Statement, list[Row]]:
        return {statement: self._run(statement, statement.branches) for statement in statements}

    def _run(self, statement: Statement, branches: Sequence[Branch]) -> list[Row]:
        if cause := self._gone.get(statement.node):
            self._failures.add(branches, cause)
            return []
        if self._failures.hopeless:
            return []
        sql, params = statement.sql(branches)
        try:
            return self._read(statement, sql, params)
        except DatabaseError as error:
            if not is_failure(error):
                raise
            code = _code(error)
            if code in _ONE_SHARD and len(branches) > 1:
                middle = len(branches) // 2
                rows = self._run(statement, branches[:middle])
                return [*rows, *self._run(statement, branches[middle:])]
            if _is_node_gone(error):
                self._gone[statement.node] = error
            self._failures.add(branches, error)
            return []

    def _read(self, statement: Statement, sql: str, params: Sequence[Any]) -> list[Row]:
        if statement.alias is not None:
            with connections[statement.alias].cursor() as cursor:
                cursor.execute(sql, params)
                return list(cursor.fetchall())
        group = self._group
        with group.wrap_database_errors, self._wrappers[statement.node].node_cursor() as raw:
            make = group.make_debug_cursor if group.queries_logged else group.make_cursor
            cursor = make(raw)
            cursor.execute(sql, params)
            return list(cursor.fetchall())

    # -- one statement per shard

    def _alias_rows(self, statement: Statement) -> Iterator[Row]:
        """Rows of one shard, read as they are asked for; closes its cursor in the end."""
        (branch,) = statement.branches
        assert statement.alias is not None
        sql, params = statement.sql()
        index = (branch.index,)
        try:
            with connections[statement.alias].chunked_cursor() as cursor:
                cursor.execute(sql, params)
                while rows := cursor.fetchmany(self._chunk_size):
                    for row in rows:
                        yield (*row, *index)
        except DatabaseError as error:
            if not is_failure(error):
                raise
            self._failures.add((branch,), error)
            self._failures.check()
