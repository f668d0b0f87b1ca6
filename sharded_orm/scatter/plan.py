"""The plan of a scatter: its statements, and the nodes (database servers) to send them to.

A *branch* is the SELECT for one shard. The branches for a node are sent in batches; each batch is
one statement, which joins its branches by UNION ALL.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.core.exceptions import EmptyResultSet
from django.db import DatabaseError, connections

from sharded_orm.backends import key_guard
from sharded_orm.backends.features import features_of
from sharded_orm.scatter.comparison import (
    Comparison,
    MySQLComparison,
    OrderKey,
    SQLiteComparison,
)
from sharded_orm.scatter.compile import CompileOptions, Template, compile_query
from sharded_orm.scatter.facade import PK_MARK, SCHEMA_MARK, SHARD_MARK
from sharded_orm.scatter.failures import Failures, is_failure
from sharded_orm.scatter.ranked_comparison import RankedComparison
from sharded_orm.scatter.refusals import refuse

if TYPE_CHECKING:
    from django.db.models.sql.query import Query

    from sharded_orm.scatter.hidden_rows import HiddenRows
    from sharded_orm.topology.model import Shard

# The maximum number of branches (SELECTs for one shard) in a UNION ALL that is not streamed. Above
# some 2048 branches, the cost of a statement grows faster than linearly. A statement of 256
# branches is cheap enough to be repeated after a failure.
BATCH = 256
# The maximum number of branches (SELECTs for one shard) in a streamed UNION ALL. It is higher than
# BATCH, because each streamed statement occupies a database session until its last row is read, and
# larger statements need fewer sessions.
STREAM_BATCH = 1024
# The maximum number of parameters of one statement. Each branch repeats the query's parameters, so
# an __in with thousands of keys soon reaches this number.
MAX_PARAMETERS = 60_000


@dataclass(frozen=True, slots=True)
class Target:
    """A shard, and the query to send to it.

    The query is that of the queryset. If it contains a list of keys (``__in``), the target may have
    a copy with only the keys of this shard.
    """

    shard: Shard
    query: Query
    #: The rows of the shard that the query must not read; None to read all rows.
    hidden: HiddenRows | None = None


@dataclass(frozen=True, slots=True)
class Branch:
    """The compiled SELECT for the shard of one :class:`Target`.

    ``index`` is the position of the target in the list of targets; each row of the result contains
    it. ``pks`` are the primary keys to read; None means all rows of the query.
    """

    index: int
    shard: Shard
    template: Template
    pks: tuple[Any, ...] | None = None

    @property
    def params(self) -> tuple[Any, ...]:
        return self.template.params if self.pks is None else (*self.template.params, *self.pks)


@dataclass(frozen=True, eq=False)
class ShardStatement:
    """A statement that executes branches (SELECTs for one shard each) on a node (a database server).

    If ``union`` is true, the branches are joined by UNION ALL. If false, there is only one branch,
    which uses the connection of its shard.
    """

    node: str
    branches: tuple[Branch, ...]
    # The alias of the shard whose connection must be used; None for a connection to the node. An
    # alias is needed in two cases: the shard's connection is in an open transaction, which may have
    # written rows, or each shard has its own connection (SQLite).
    alias: str | None
    union: bool
    outer: Outer

    def sql(self, branches: Sequence[Branch] | None = None) -> tuple[str, list[Any]]:
        """Return the SQL and the parameters of the statement.

        :param branches: the branches (SELECTs for one shard each) to include; None means all
            branches of the statement.
        """
        branches = self.branches if branches is None else branches
        if not self.union:
            (branch,) = branches
            return _fill(branch, None), list(branch.params)
        sql, params = union_sql(branches)
        return self.outer.sql(sql), params


@dataclass(frozen=True)
class Outer:
    """The outer SELECT around a UNION ALL. It sorts and limits the rows, and adds sort weights.

    ``columns`` is the number of columns of a branch (the SELECT for one shard), without the column
    of the shard's index. ``weights`` is SQL for additional columns, such as the sort weights of
    texts. ``nulls_smallest`` is true if the database sorts NULL before all values; if false, it
    sorts NULL after them and supports NULLS FIRST and NULLS LAST.
    """

    columns: int
    weights: tuple[str, ...] = ()
    order: tuple[OrderKey, ...] = ()
    limit: int | None = None
    nulls_smallest: bool = True

    def sql(self, union: str) -> str:
        if not self.weights and not self.order and self.limit is None:
            return union
        selected = ", ".join([column_names(self.columns), *self.weights])
        sql = f"SELECT {selected} FROM ({named_union(union, self.columns)}) u"
        if self.order:
            sql += " ORDER BY " + ", ".join([*map(self._order_sql, self.order), "s"])
        if self.limit is not None:
            sql += f" LIMIT {self.limit:d}"
        return sql

    def _order_sql(self, key: OrderKey) -> str:
        sql = f"c{key.column} {'DESC' if key.descending else 'ASC'}"
        if key.nulls_first == (key.descending != self.nulls_smallest):
            return sql
        if self.nulls_smallest:
            return f"c{key.column} IS {'NOT ' * key.nulls_first}NULL, {sql}"
        return f"{sql} NULLS {'FIRST' if key.nulls_first else 'LAST'}"


def column_names(columns: int) -> str:
    """Return the names of the columns of a union: ``c0``, ``c1``, …, and ``s`` for the shard's index."""
    return ", ".join([*(f"c{i}" for i in range(columns)), "s"])


def named_union(union: str, columns: int) -> str:
    """Return a SELECT that reads a union, and in which the columns of the union have names."""
    # The WITH clause names the columns. It is inside a SELECT, because the database backend assumes
    # that a statement which begins with WITH may write, and repeats only reads after a lost
    # connection.
    return f"WITH v ({column_names(columns)}) AS ({union}) SELECT * FROM v"


def union_sql(branches: Sequence[Branch]) -> tuple[str, list[Any]]:
    """Return the SQL of a UNION ALL of ``branches`` (SELECTs for one shard), and its parameters."""
    params: list[Any] = []
    parts = []
    for branch in branches:
        ops = branch.template.compiler.connection.ops
        parts.append(f"({_fill(branch, _quote(ops, branch.shard.schema))})")
        params += branch.params
    return " UNION ALL ".join(parts), params


def _quote(ops: Any, schema: str) -> str:
    mark = ops.quote_name("x")[0]
    quoted = f"{mark}{schema.replace(mark, mark * 2)}{mark}"
    return quoted.replace("%", "%%")


def _fill(branch: Branch, schema: str | None) -> str:
    sql = branch.template.sql
    if schema is not None:
        sql = sql.replace(SCHEMA_MARK, schema).replace(SHARD_MARK, str(branch.index))
    if branch.pks is not None:
        sql = sql.replace(PK_MARK, ", ".join(["%s"] * len(branch.pks)))
    return sql


@dataclass(frozen=True)
class ScatterPlan:
    """The statements to send, in the order of their first shards, and the data to merge their rows.

    ``comparison`` compares values as the databases do. ``template`` is the compiled query of the
    first branch; None if there is nothing to send. ``shards`` maps the index of each target to its
    shard.
    """

    statements: tuple[ShardStatement, ...]
    comparison: Comparison
    template: Template | None
    shards: Mapping[int, Shard]

    @property
    def union(self) -> bool:
        return any(statement.union for statement in self.statements)


def make_plan(
    targets: Sequence[Target],
    options: CompileOptions,
    failures: Failures,
    *,
    pks: Mapping[int, Sequence[Any]] | None = None,
    batch: int | None = None,
    templates: dict[str, Template] | None = None,
) -> ScatterPlan:
    """Plan the statements for ``targets``.

    Each query is compiled once per node (database server), and once more for each shard with hidden
    rows. A query that can return no rows is not sent. If a node does not answer while a query is
    compiled for it, all shards of the node are added to ``failures``, and the plan has no statement
    for the node.

    :param pks: the primary keys to read from each target, keyed by the target's index; a target
        without keys is not queried. None means to read all rows of the query.
    :param batch: the maximum number of branches (SELECTs for one shard each) in one statement; None
        means :data:`BATCH`. A database that limits the tables of a statement may lower it.
    :param templates: the templates of former plans of the same query and options, by node. They are
        used again, and new ones are added. Only for targets that have the same query and no hidden
        rows. None (the default): compile the query.
    :raises ScatterError: a node does not answer, and partial results are not allowed.
    """
    branches: dict[str, list[Branch]] = {}
    compiled: dict[tuple[int, str, int], Template | None] = {}
    unreachable: dict[str, DatabaseError] = {}
    for index, target in enumerate(targets):
        if pks is not None and index not in pks:
            continue
        node_query = (id(target.query), target.shard.node, id(target.hidden))
        if cause := unreachable.get(target.shard.node):
            failures.add([target.shard], cause)
            continue
        if templates is not None and target.shard.node in templates:
            compiled[node_query] = templates[target.shard.node]
        elif node_query not in compiled:
            try:
                compiled[node_query] = _compile(target, options)
            except DatabaseError as error:
                if not is_failure(error):
                    raise
                unreachable[target.shard.node] = error
                failures.add([target.shard], error)
                continue
        template = compiled[node_query]
        if template is not None:
            if templates is not None:
                templates[target.shard.node] = template
            keys = tuple(pks[index]) if pks is not None else None
            branches.setdefault(target.shard.node, []).append(
                Branch(index, target.shard, template, keys)
            )
    for node in list(branches):
        if (cause := _text_key_failure(branches[node])) is not None:
            failures.add([branch.shard for branch in branches.pop(node)], cause)
    failures.check()
    shards = {i: target.shard for i, target in enumerate(targets)}
    first = next((b[0] for b in branches.values()), None)
    if first is None:
        return ScatterPlan((), Comparison((), ()), None, shards)
    comparison = _comparison(first)
    outer = _outer(first.template, comparison, options) if not options.counted else Outer(1)
    statements: list[ShardStatement] = []
    for node, node_branches in branches.items():
        statements += _statements(node, node_branches, outer, batch or BATCH)
    statements.sort(key=lambda statement: statement.branches[0].index)
    return ScatterPlan(tuple(statements), comparison, first.template, shards)


def _outer(template: Template, comparison: Comparison, options: CompileOptions) -> Outer:
    width, weights = len(template.columns), comparison.weights
    if template.merges_groups:
        return Outer(width, weights)
    # Do not limit the rows on the server if the query has DISTINCT: only the merge removes
    # duplicates from different shards, so the server would count them.
    limit = None if template.distinct else options.limit
    nulls_smallest = template.compiler.connection.features.order_by_nulls_first
    return Outer(width, weights, template.order, limit, nulls_smallest)


def _compile(target: Target, options: CompileOptions) -> Template | None:
    wrapper: Any = connections[target.shard.alias]
    try:
        with wrapper.wrap_database_errors:
            return compile_query(
                target.query,
                wrapper,
                options,
                qualify=wrapper.features.can_union_shards,
                hidden=target.hidden,
            )
    except EmptyResultSet:
        return None


def _text_key_failure(branches: Sequence[Branch]) -> DatabaseError | None:
    """Check that the node of ``branches`` compares text shard keys as exactly as the router does.

    For the router, ``Ada`` and ``ada`` are different keys. Return None after the check, or the
    database's error if the node does not answer.

    :raises InexactShardKey: the node compares text keys less exactly than the router.
    """
    tables = frozenset().union(*(branch.template.tables for branch in branches))
    shards = [branch.shard for branch in branches]
    try:
        key_guard.check(connections[shards[0].alias], shards, tables)
    except DatabaseError as error:
        if not is_failure(error):
            raise
        return error
    return None


def _comparison(branch: Branch) -> Comparison:
    template = branch.template
    connection = template.compiler.connection
    compared_by = features_of(connection).text_compared_by
    if compared_by == "bytes":
        return SQLiteComparison(template.columns, template.compared)
    if compared_by == "weights":
        native = bool(connection.features.has_native_uuid_field)
        return MySQLComparison(
            template.columns,
            template.compared,
            uuid_version=connection.mysql_version if native else None,
        )
    if compared_by == "ranks":
        return RankedComparison(
            template.columns,
            template.compared,
            template.summed,
            reads_utc=connection.timezone is not None and connection.timezone_name == "UTC",
        )
    raise refuse(f"the database {connection.vendor!r}", "ask one shard")


def _statements(
    node: str, branches: Iterable[Branch], outer: Outer, batch_size: int
) -> Iterable[ShardStatement]:
    branches = list(branches)
    shard = branches[0].shard
    wrapper: Any = connections[shard.alias]
    if not wrapper.features.can_union_shards:
        for branch in branches:
            yield ShardStatement(node, (branch,), branch.shard.alias, False, outer)
        return
    group: Any = connections[shard.group]
    in_transaction = group.open_transactions()
    batch: list[Branch] = []
    params = tables = 0
    most_tables = features_of(wrapper).max_scattered_tables or sys.maxsize
    for branch in branches:
        if in_transaction and branch.shard.alias in in_transaction:
            yield ShardStatement(node, (branch,), branch.shard.alias, True, outer)
            continue
        count, named = len(branch.params), branch.template.sql.count(SCHEMA_MARK)
        if batch and (
            len(batch) >= batch_size
            or params + count > MAX_PARAMETERS
            or tables + named > most_tables
        ):
            yield ShardStatement(node, tuple(batch), None, True, outer)
            batch, params, tables = [], 0, 0
        batch.append(branch)
        params += count
        tables += named
    if batch:
        yield ShardStatement(node, tuple(batch), None, True, outer)
