"""Reads from a server how it orders values that Python cannot compare.

The *rank* of a value is its place in the server's order: the smallest value has rank 1, the next
greater one rank 2. Equal values have the same rank. All values of a column are sent to one node (a
database server), which returns their ranks. So that server's type and collation decide the order,
and which values are equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from django.db import DatabaseError

from sharded_orm.scatter.failures import is_failure
from sharded_orm.scatter.plan import ScatterPlan, ShardStatement, named_union, union_sql
from sharded_orm.scatter.ranked_comparison import RankedComparison
from sharded_orm.scatter.refusals import refuse

if TYPE_CHECKING:
    from sharded_orm.scatter.comparison import Row
    from sharded_orm.scatter.execute import Executor
    from sharded_orm.scatter.plan import Branch

# This query reads from a node the types and collations of the columns of the scatter's query, and
# facts that determine the order of their values, such as the version of a locale. Nodes with equal
# facts sort in the same way. The scatter's query is a subquery here ({rows}), with LIMIT 0, only to
# get the types of its columns. Some types without a collation, such as jsonb, contain texts.
# PostgreSQL sorts these texts by the collation of the database, so this collation is one of the
# facts. to_jsonb() is used because the catalogs of PostgreSQL's versions have different columns.
_FACTS = """
SELECT d.n, quote_ident(tn.nspname) || '.' || quote_ident(t.typname),
 CASE WHEN t.typcollation <> 0 THEN quote_ident(kn.nspname) || '.' || quote_ident(k.collname) END,
 d.type = ANY ('{{text,varchar,name}}'::regtype[]) AND k.collisdeterministic,
 d.type = ANY ('{{text,varchar}}'::regtype[]) AND getdatabaseencoding() = 'UTF8' AND
  CASE WHEN k.collprovider = 'd' THEN (SELECT b.datcollate IN ('C', 'POSIX')
    AND COALESCE(to_jsonb(b) ->> 'datlocprovider', 'c') = 'c'
    FROM pg_database b WHERE b.datname = current_database())
  ELSE k.collcollate IN ('C', 'POSIX') AND k.collprovider = 'c' END,
 jsonb_build_array(getdatabaseencoding(),
  CASE WHEN t.typcollation = 0 OR k.collprovider = 'd' THEN (SELECT jsonb_build_array(
    {database_version}, to_jsonb(b) -> 'datlocprovider', b.datcollate, b.datctype,
    COALESCE(to_jsonb(b) -> 'daticulocale', to_jsonb(b) -> 'datlocale'), to_jsonb(b) -> 'daticurules')
    FROM pg_database b WHERE b.datname = current_database())
  ELSE jsonb_build_array(pg_collation_actual_version(k.oid), jsonb_strip_nulls(to_jsonb(k)
    - '{{oid,collname,collnamespace,collowner,collversion}}'::text[])) END,
  (SELECT jsonb_agg(e.enumlabel ORDER BY e.enumsortorder) FROM pg_enum e WHERE e.enumtypid = t.oid)
  {settings})::text
FROM (SELECT 1) one LEFT JOIN ({rows} LIMIT 0) u ON true
CROSS JOIN LATERAL (VALUES {columns}) d (n, type, collate_name)
JOIN pg_type t ON t.oid = d.type JOIN pg_namespace tn ON tn.oid = t.typnamespace
LEFT JOIN pg_collation k ON k.oid = d.collate_name::regcollation
LEFT JOIN pg_namespace kn ON kn.oid = k.collnamespace
"""
_COLUMN = "({0}, pg_typeof(u.c{0})::oid, pg_collation_for(CAST(u.c{0} AS text)))"
# SQL for the server's settings that determine how it writes values as text.
_SETTINGS = "".join(
    f", current_setting('{name}')"
    for name in ("DateStyle", "IntervalStyle", "TimeZone", "extra_float_digits", "lc_monetary")
)
_DATABASE_VERSION = "pg_database_collation_actual_version(b.oid)"
# Before version 15, PostgreSQL has no function for the version of a database's collation. But in
# these versions, the collation of a database is always one of the C library. So read the version of
# the C library's collation that has the same name.
_OLD_DATABASE_VERSION = (
    "(SELECT max(pg_collation_actual_version(o.oid)) FROM pg_collation o"
    " WHERE o.collcollate = b.datcollate AND o.collprovider = 'c')"
)
_RANKS = (
    "SELECT dense_rank() OVER (ORDER BY CAST(r.v AS {type}){collate})"
    " FROM unnest(CAST(%s AS text[])) WITH ORDINALITY r (v, n) ORDER BY r.n"
)


class ValueType(NamedTuple):
    """The type and the collation of a column's values, as defined on one node.

    :param type: the type's name in SQL.
    :param collation: the collation's name in SQL; None if the type has none.
    :param is_exact: whether equal values always have the same text. False for numeric, for example:
        1.0 equals 1.00.
    :param is_by_bytes: whether the node sorts the values in the same order in which Python sorts
        their texts.
    :param facts: JSON with all facts that determine the order of the values.
    """

    type: str
    collation: str | None
    is_exact: bool
    is_by_bytes: bool
    facts: str


class Ranking:
    """Reads from a server the ranks of values that Python cannot compare.

    The merge of the shards' rows compares these values by their ranks. If the merge need not
    compare such values, no query is sent. Not thread-safe.
    """

    def __init__(self, plan: ScatterPlan, executor: Executor) -> None:
        self._plan = plan
        self._executor = executor
        self._failures = executor.failures
        self._types: dict[int, ValueType] | None = None
        self._statement: ShardStatement | None = None

    def is_needed(self, columns: Iterable[int]) -> bool:
        """Whether a server must rank the values of ``columns`` before Python can sort by them."""
        return not self._plan.comparison.ranked.isdisjoint(columns)

    def is_needed_for_equality(self, columns: Sequence[int]) -> bool:
        """Whether a server must rank the values of ``columns`` before Python can find equal values.

        The first call may query each node for the types of the columns.
        """
        comparison = self._plan.comparison
        ranked = comparison.ranked.intersection(columns)
        if not ranked or not isinstance(comparison, RankedComparison):
            return False
        types = self._types_of_columns(comparison)
        for column in ranked:
            comparison.equality_ranks[column] = None
        return not all(types[column].is_exact for column in ranked if column in types)

    def rank(
        self, rows: Sequence[Row], *, order: Iterable[int] = (), equality: Iterable[int] = ()
    ) -> None:
        """Ask a server for the ranks of values in ``rows``, and pass them to the comparison.

        The comparison drops the ranks of an earlier call.

        :param order: the positions of the columns by which the rows are sorted.
        :param equality: the positions of the columns that determine whether two rows are equal.
        """
        comparison = self._plan.comparison
        columns = comparison.ranked.intersection({*order, *equality})
        if not columns or not rows or not isinstance(comparison, RankedComparison):
            return
        types = self._types_of_columns(comparison)
        for column in columns:
            if column not in types:  # No node has answered, so nothing can be ranked.
                continue
            kind = types[column]
            comparison.order_ranks[column] = comparison.equality_ranks[column] = None
            is_ordered = column in order and not kind.is_by_bytes
            if is_ordered or (column in equality and not kind.is_exact):
                texts = {text for row in rows if (text := comparison.text(row, column)) is not None}
                ranks = self._ranks(sorted(texts), kind) if texts else {}
                if is_ordered:
                    comparison.order_ranks[column] = ranks
                if not kind.is_exact:
                    comparison.equality_ranks[column] = ranks

    def _ranks(self, texts: list[str], kind: ValueType) -> dict[str, int]:
        assert self._statement is not None
        collate = f" COLLATE {kind.collation}" if kind.collation else ""
        sql = _RANKS.format(type=kind.type, collate=collate).replace("%", "%%")
        ranks = self._ask(self._statement, sql.replace("%%s", "%s"), [texts])
        return {text: rank for text, (rank,) in zip(texts, ranks, strict=True)}

    def _types_of_columns(self, comparison: RankedComparison) -> dict[int, ValueType]:
        """Return the types of the ranked columns. The first call queries each node of the plan.

        :raises ScatterNotSupported: two nodes order the values differently.
        """
        if self._types is not None:
            return self._types
        types: dict[int, ValueType] = {}
        for statement, branch in self._answering_branches():
            rows, params = union_sql([branch])
            width = len(comparison.columns)
            sql = _FACTS.format(
                database_version=_database_version(branch),
                settings=_SETTINGS if comparison.depends_on_settings else "",
                rows="{rows}",
                columns=", ".join(map(_COLUMN.format, sorted(comparison.ranked))),
            ).replace("{rows}", named_union(rows, width))
            for number, *facts in self._ask(statement, sql, params):
                kind = ValueType(*facts)
                # Keep the names of types and collations that the first node has reported, because
                # the first node ranks the values. Another node may have another name for the same
                # collation.
                first = types.setdefault(number, kind)
                if (first.type, first.facts) != (kind.type, kind.facts):
                    assert self._statement is not None
                    raise _refuse_nodes(self._statement.node, statement.node, kind)
            self._statement = self._statement or statement
        self._types = types
        return types

    def _answering_branches(self) -> Iterator[tuple[ShardStatement, Branch]]:
        """Yield a pair for each node: one of its statements, and a branch that has not failed.

        A branch is the SELECT for one shard. It is a part of the statement.
        """
        nodes: set[str] = set()
        for statement in self._plan.statements:
            for branch in statement.branches:
                if statement.node not in nodes and branch.shard.alias not in self._failures.causes:
                    nodes.add(statement.node)
                    yield statement, branch

    def _ask(self, statement: ShardStatement, sql: str, params: Sequence[Any]) -> list[Row]:
        try:
            return self._executor.read(statement, sql, params)
        except DatabaseError as error:
            if not is_failure(error):
                raise
            shards = [
                branch.shard
                for other in self._plan.statements
                if other.node == statement.node
                for branch in other.branches
            ]
            self._failures.add(shards, error)
            raise self._failures.error() from error


def _database_version(branch: Branch) -> str:
    # ``compiler.connection`` is only a copy of the shard's connection object, and never connects.
    # Its ``features`` still refer to the shard's connection object.
    wrapper: Any = branch.template.compiler.connection.features.connection
    return _DATABASE_VERSION if wrapper.pg_version >= 150000 else _OLD_DATABASE_VERSION


def _refuse_nodes(one: str, other: str, kind: ValueType) -> Exception:
    what = f"collation {kind.collation}" if kind.collation else f"type {kind.type}"
    return refuse(
        f"an order or groups by values of the {what}, which the nodes {one!r} and {other!r} may"
        " order differently (see the locales and their versions in pg_database and pg_collation)",
        "order by Collate(field, 'C'), or give the databases the same locale of the same version",
    )
