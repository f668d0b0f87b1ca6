"""The plan of a scatter: its statements, and the nodes (database servers) to send them to.

A *branch* is the SELECT for one shard. The branches for a node are sent in batches; each batch is
one statement, which joins its branches by UNION ALL.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from django.core.exceptions import EmptyResultSet
from django.db import DatabaseError, connections

from sharded_orm.backends.features import features_of
from sharded_orm.backends.group.shard_connections import connection_of
from sharded_orm.scatter.branch_text import branch_ends, branch_sql
from sharded_orm.scatter.column_checks import text_key_failure, value_type_failure
from sharded_orm.scatter.comparison import (
    Comparison,
    OrderKey,
    SQLiteComparison,
)
from sharded_orm.scatter.compile import compile_query
from sharded_orm.scatter.facade import PK_MARK, SCHEMA_MARK
from sharded_orm.scatter.failures import Failures, is_failure
from sharded_orm.scatter.ranked_comparison import RankedComparison
from sharded_orm.scatter.refusals import refuse
from sharded_orm.scatter.template import CompileOptions, Template, count_of
from sharded_orm.scatter.weighted_comparison import MySQLComparison

if TYPE_CHECKING:
    from django.db.models.sql.query import Query

    from sharded_orm.scatter.hidden_rows import HiddenRows
    from sharded_orm.topology.model import Shard

# The maximum number of branches (SELECTs for one shard) in a UNION ALL whose rows are read all at
# once. Above some 2048 branches, the cost of a statement grows faster than linearly. A statement of
# 256 branches is cheap enough to be repeated after a failure.
BATCH = 256
# The maximum number of branches in a UNION ALL that is streamed, that is, whose rows are read on
# demand. Each streamed statement occupies a database session until its last row is read. So this
# number is higher than BATCH: a query then needs fewer statements, and fewer sessions.
STREAM_BATCH = 1024
# The maximum number of parameters of one statement. The SELECT for each shard repeats the query's
# parameters, so an __in with thousands of keys soon reaches this number. A long text counts as
# several parameters, so a statement has about 2 MB: a server of MariaDB accepts 16 MB by default.
MAX_PARAMETERS = 60_000
# The number of statement texts in the LRU cache of a process. Making the text of a statement for
# many shards takes time, and a site sends the same queries again and again, with different
# parameters.
_TEXTS = 8
_INTEGERS = frozenset({int})


class Target(NamedTuple):
    """A shard, and the query to send to it.

    The query is that of the queryset. If it has a list of keys (``__in``), the query may be a copy
    whose list contains only the keys of this shard.
    """

    shard: Shard
    query: Query
    #: The rows of the shard that the query must not read; None to read all rows.
    hidden: HiddenRows | None = None


class Branch(NamedTuple):
    """The compiled SELECT for the shard of one :class:`Target`.

    :param position: the position of the target in the list of targets. The SELECT returns it in
        each row, so that the merge knows the shard of the row.
    :param pks: the primary keys to read; None means all rows of the query.
    """

    position: int
    shard: Shard
    template: Template
    pks: tuple[Any, ...] | None = None

    @property
    def params(self) -> tuple[Any, ...]:
        return self.template.params if self.pks is None else (*self.template.params, *self.pks)

    @property
    def parameter_count(self) -> int:
        """The number of :attr:`params`, in which a long text counts as several."""
        return self.template.parameter_count + (0 if self.pks is None else count_of(self.pks))


@dataclass(frozen=True, eq=False)
class ShardStatement:
    """A statement that executes the SELECTs for one or more shards on their node (database server).

    The SELECT for one shard is called a branch. If ``union`` is true, UNION ALL joins the branches.
    If false, there is one branch, on the connection of its shard.
    """

    node: str
    branches: tuple[Branch, ...]
    # The alias of the shard whose connection must be used; None for a connection to the node. A
    # shard's connection is used in two cases: it has an open transaction, whose own changes the
    # statement must see; or the database is SQLite, which has no connections to nodes.
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
            return _fill_keys(branch), list(branch.params)
        template = branches[0].template
        if all(branch.template is template and branch.pks is None for branch in branches):
            places = tuple([(branch.shard.schema, branch.position) for branch in branches])
            text = _statement_text(self.outer, template.sql, _mark(template), places)
            return text, list(template.params) * len(branches)
        sql, params = union_sql(branches)
        return self.outer.sql(sql), params

    def with_keys(self) -> tuple[str, str] | None:
        """Return a pair: the SQL with the keys written into it, and the template of its SELECTs.

        Because the SQL contains the keys, the driver need not insert thousands of them as
        parameters. All SELECTs of the union are made from the same template. In it, marks stand
        for the keys, the schema and the shard's index.

        Return None if the SELECTs are not made from one template, if an outer SELECT is needed, or
        if a parameter is not an integer key.
        """
        template = self.branches[0].template
        if not self.union or self.outer.is_used or template.params:
            return None
        select, mark, selects = template.sql, _mark(template), []
        for position, shard, own_template, keys in self.branches:
            if (
                keys is None
                or own_template is not template
                or not _INTEGERS.issuperset(map(type, keys))
                or (ends := branch_ends(select, mark, shard.schema, position)) is None
            ):
                return None
            selects.append(f"{ends[0]}{', '.join(map(str, keys))}{ends[1]}")
        return _UNION.join(selects), select


@dataclass(frozen=True)
class Outer:
    """The outer SELECT around a UNION ALL. It sorts and limits the rows, and adds sort weights.

    :param columns: the number of columns of each SELECT in the union, without the shard's index.
    :param weights: SQL for additional columns, such as the sort weights of texts.
    :param nulls_smallest: whether the database sorts NULL before all values. If False, it sorts NULL
        after all values, and supports NULLS FIRST and NULLS LAST.
    :param names_columns: whether the database accepts names for the columns after a subquery, as in
        ``(SELECT …) v (a, b)``.
    """

    columns: int
    weights: tuple[str, ...] = ()
    order: tuple[OrderKey, ...] = ()
    limit: int | None = None
    nulls_smallest: bool = True
    names_columns: bool = False

    @property
    def is_used(self) -> bool:
        """Whether the outer SELECT is needed, because it sorts, limits or adds columns."""
        return bool(self.weights or self.order or self.limit is not None)

    def sql(self, union: str) -> str:
        if not self.is_used:
            return union
        selected = ", ".join([column_names(self.columns), *self.weights])
        if self.names_columns:
            # Name the columns after the subquery. This is faster than the WITH clause in the else
            # branch: the server first copies the query of a WITH clause to the place of its use.
            sql = f"SELECT {selected} FROM ({union}) AS u ({column_names(self.columns)})"
        else:
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
    """Return SQL that reads a union and names its columns.

    This SQL begins with WITH, so use it only as a subquery of a SELECT. After the loss of a
    connection, the database backend repeats a statement that begins with SELECT. It does not repeat
    one that begins with WITH, because such a statement may write.
    """
    return f"WITH v ({column_names(columns)}) AS ({union}) SELECT * FROM v"


def union_sql(branches: Sequence[Branch]) -> tuple[str, list[Any]]:
    """Return the SQL of a UNION ALL of ``branches`` (SELECTs for one shard), and its parameters."""
    params: list[Any] = []
    parts = []
    mark = _mark(branches[0].template)
    for branch in branches:
        parts.append(branch_sql(_fill_keys(branch), mark, branch.shard.schema, branch.position))
        params += branch.params
    return _UNION.join(parts), params


_UNION = " UNION ALL "
_NOT_COMPARED = Comparison((), ())


@lru_cache(maxsize=_TEXTS)
def _statement_text(outer: Outer, sql: str, mark: str, places: tuple[tuple[str, int], ...]) -> str:
    """Return the statement that executes the same SELECT on many shards.

    :param sql: the SELECT, with marks in the places of the shard's schema and index.
    :param mark: the database's quotation mark for names.
    :param places: the schema and the index of each shard.
    """
    return outer.sql(_UNION.join([branch_sql(sql, mark, *place) for place in places]))


def _mark(template: Template) -> str:
    mark: str = template.compiler.connection.ops.quote_name("x")[0]
    return mark


def _fill_keys(branch: Branch) -> str:
    sql = branch.template.sql
    if branch.pks is None:
        return sql
    return sql.replace(PK_MARK, ", ".join(["%s"] * len(branch.pks)))


@dataclass(frozen=True)
class ScatterPlan:
    """The statements of a scatter, and what is needed to merge their rows.

    :param comparison: compares values as the databases do.
    :param template: the compiled query for the first shard; None if there is nothing to send.
    :param shards: maps the index of each target to its shard.
    """

    statements: tuple[ShardStatement, ...]
    comparison: Comparison
    template: Template | None
    shards: Mapping[int, Shard]

    @property
    def union(self) -> bool:
        return any(statement.union for statement in self.statements)

    @property
    def sorts_texts(self) -> bool:
        """Whether the query has an order by texts."""
        if self.template is None:
            return False
        columns = self.template.columns
        return any(columns[key.column].kind == "text" for key in self.template.order)


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

    Each query is compiled once per node (database server), and separately for a shard with hidden
    rows. A query that can return no rows is not sent. If a node does not answer while a query is
    compiled for it, its shards are added to ``failures``, and it gets no statement.

    :param pks: maps the index of each target to the primary keys to read from it; a target without
        keys is not queried. None means to read all rows of the query.
    :param batch: the maximum number of branches (SELECTs for one shard each) in one statement; None
        means :data:`BATCH`. A database that limits the tables of a statement may lower it.
    :param templates: maps each node to the template (compiled SELECT) of earlier calls. This call
        uses these templates, and adds those that it compiles. The earlier calls must have had the
        same query and options, and no target may have hidden rows. None means to compile the query.
    :raises ScatterError: a node does not answer, and partial results are not allowed.
    """
    branches: dict[str, list[Branch]] = {}
    compiled: dict[tuple[int, str, int], Template | None] = {}
    unreachable: dict[str, DatabaseError] = {}
    for index in range(len(targets)) if pks is None else sorted(pks):
        shard, query, hidden = target = targets[index]
        node = shard.node
        keys = None if pks is None else tuple(pks[index])
        if templates and (known := templates.get(node)) is not None:
            branches.setdefault(node, []).append(Branch(index, shard, known, keys))
            continue
        if unreachable and node in unreachable:
            failures.add([shard], unreachable[node])
            continue
        node_query = (id(query), node, id(hidden))
        if node_query not in compiled:
            try:
                template = _compile(target, options)
            except DatabaseError as error:
                if not is_failure(error):
                    raise
                unreachable[node] = error
                failures.add([shard], error)
                continue
            compiled[node_query] = template
            if template is not None and templates is not None:
                templates[node] = template
        template = compiled[node_query]
        if template is not None:
            branches.setdefault(node, []).append(Branch(index, shard, template, keys))
    for node in list(branches):
        of_node = branches[node]
        cause = text_key_failure(of_node) or value_type_failure(of_node[0])
        if cause is not None:
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
    statements.sort(key=lambda statement: statement.branches[0].position)
    return ScatterPlan(tuple(statements), comparison, first.template, shards)


def plan_by_key(
    keys: Mapping[Shard, Sequence[Any]], templates: Mapping[str, Template], failures: Failures
) -> ScatterPlan | None:
    """Plan the statements that read rows by keys, as :func:`make_plan` does, but three times as
    fast.

    Return None if the template (the compiled SELECT) of a node is missing. Then call
    :func:`make_plan`, which compiles it.

    :param keys: the keys to read from each shard of one group.
    :param templates: the templates of the query for all nodes, see :func:`make_plan`.
    :raises ScatterError: a node does not answer.
    """
    branches: dict[str, list[Branch]] = {}
    shards: dict[int, Shard] = {}
    for shard, values in keys.items():
        node, number = shard.node, shard.number
        template = templates.get(node)
        if template is None:
            return None
        # Use the shard's number as its index. Then the text of the shard's SELECT is the same in
        # all plans, and can be taken from the cache of branch_ends().
        shards[number] = shard
        branches.setdefault(node, []).append(Branch(number, shard, template, tuple(values)))
    for of_node in branches.values():
        if (cause := text_key_failure(of_node)) is not None:
            failures.add([branch.shard for branch in of_node], cause)
    failures.check()
    statements: list[ShardStatement] = []
    for node, of_node in branches.items():
        statements += _statements(node, of_node, Outer(len(of_node[0].template.columns)), BATCH)
    # Rows that are read by keys are not merged, so nothing is compared.
    return ScatterPlan(tuple(statements), _NOT_COMPARED, statements[0].branches[0].template, shards)


def _outer(template: Template, comparison: Comparison, options: CompileOptions) -> Outer:
    width, weights = len(template.columns), comparison.weights
    connection = template.compiler.connection
    names_columns = features_of(connection).names_columns_of_subqueries
    if template.merges_groups:
        return Outer(width, weights, names_columns=names_columns)
    # Send no LIMIT to the server if the query has DISTINCT. Equal rows of two shards would both
    # count for the server's LIMIT, so the result could have too few rows. The merge removes the
    # duplicates first, and then applies the LIMIT.
    limit = None if template.distinct else options.limit
    nulls_smallest = connection.features.order_by_nulls_first
    return Outer(width, weights, template.order, limit, nulls_smallest, names_columns)


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
            divides=template.divides,
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
    wrapper: Any = connection_of(shard.alias)
    if not wrapper.features.can_union_shards:
        for branch in branches:
            yield ShardStatement(node, (branch,), branch.shard.alias, False, outer)
        return
    group: Any = connection_of(shard.group)
    in_transaction = group.open_transactions()
    batch: list[Branch] = []
    params = tables = 0
    most_tables = features_of(wrapper).max_scattered_tables or sys.maxsize
    if (
        not in_transaction
        and most_tables == sys.maxsize
        and len(branches) <= batch_size
        and sum([branch.parameter_count for branch in branches]) <= MAX_PARAMETERS
    ):
        yield ShardStatement(node, tuple(branches), None, True, outer)
        return
    template, named = None, 0
    for branch in branches:
        if in_transaction and branch.shard.alias in in_transaction:
            yield ShardStatement(node, (branch,), branch.shard.alias, True, outer)
            continue
        if branch.template is not template:
            template = branch.template
            named = template.sql.count(SCHEMA_MARK)
        count = branch.parameter_count
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
