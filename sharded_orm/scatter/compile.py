"""Compiles a query to a template of the SQL, once for all shards of a node (a database server).

The SQL comes from subclasses of Django's compilers, with three changes:

- A placeholder for the shard's schema is put before each table's name.
- The expressions of ORDER BY and GROUP BY are selected as extra columns, for the merge.
- A query is refused if any part of it has a feature whose results cannot be merged exactly.

A *branch* is the SELECT for one shard. The branches for a node are joined by UNION ALL. A query for
few rows may be sent in two phases (:mod:`sharded_orm.scatter.first_rows`): the first reads primary
keys, the second reads the chosen rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from django.core.exceptions import EmptyResultSet, FullResultSet
from django.db.models.expressions import Col, ColPairs, OrderBy, Ref, Value
from django.db.models.sql.compiler import PositionRef, SQLCompiler
from django.db.models.sql.where import WhereNode

from sharded_orm.backends.features import features_of
from sharded_orm.scatter.comparison import Column, OrderKey, column_of, has_field
from sharded_orm.scatter.counted_ids import refuse_comparison
from sharded_orm.scatter.facade import SHARD_MARK, Facade
from sharded_orm.scatter.key_condition import KeyAmong
from sharded_orm.scatter.partial_aggregates import Partial, partial_of
from sharded_orm.scatter.refusals import (
    columns_in,
    is_chance,
    is_time,
    parts_of,
    refuse,
    refuse_distinct_keys,
    refuse_scores,
    refuse_time_and_chance,
)
from sharded_orm.scatter.rounded_floats import widened
from sharded_orm.scatter.summands import refuse_narrow
from sharded_orm.scatter.template import CompileOptions, Template

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.models.sql.query import Query

    from sharded_orm.scatter.hidden_rows import HiddenRows


def compile_query(
    query: Query,
    wrapper: BaseDatabaseWrapper,
    options: CompileOptions,
    *,
    qualify: bool,
    hidden: HiddenRows | None = None,
) -> Template:
    """Compile a copy of ``query`` for all shards on the same node (database server).

    :param wrapper: the connection object of one of these shards.
    :param qualify: whether to put a placeholder for the schema before each table's name.
    :param hidden: determines which rows the query must not read; None to read all rows.
    :raises EmptyResultSet: the query can have no rows.
    :raises ScatterNotSupported: the results of the query cannot be merged exactly.
    """
    query = query.clone()
    query.clear_limits()
    if options.by_key is not None:
        # A WhereNode accepts a KeyAmong as a child, because KeyAmong has all the attributes that a
        # WhereNode uses. The type is ignored, because mypy expects a subclass of Django's Node.
        query.where = WhereNode([query.where, KeyAmong(query, options.by_key)])  # type: ignore[list-item]  # it has the attributes of a lookup
        query.clear_ordering(force=True)
    facade = Facade(wrapper, qualify=qualify, hidden=hidden)
    compiler = facade.root(_Root, query)
    compiler.options = options
    compiler.marks_rows = qualify
    compiler.elide_empty = options.elide_empty
    sql, params = compiler.as_sql(with_col_aliases=options.counted)
    if options.counted:
        sql = _count_sql(sql, qualify)
    if options.limit is not None and not compiler.merges_groups:
        sql += f" LIMIT {options.limit:d}"
    return Template(
        sql=sql,
        params=tuple(params),
        compiler=compiler,
        width=compiler.col_count,
        columns=tuple(compiler.columns),
        order=tuple(compiler.order_keys),
        distinct=tuple(compiler.distinct_columns),
        groups=tuple(compiler.group_columns),
        partials=tuple(compiler.partials),
        divides=options.divides or any(partial.divides for partial in compiler.partials),
        merges_groups=compiler.merges_groups,
        pk=compiler.pk_column,
        tables=frozenset(facade.tables),
    )


def _count_sql(sql: str, qualify: bool) -> str:
    if not qualify:
        return f"SELECT COUNT(*) FROM ({sql}) counted"
    return f"SELECT COUNT(*), {SHARD_MARK} FROM ({sql}) counted"


class _Root(SQLCompiler):
    """The compiler of the outermost query of a branch, the SELECT for one shard.

    It adds the columns that the merge needs.
    """

    options: CompileOptions
    marks_rows: bool
    _group_expressions: Sequence[Any] = ()

    def pre_sql_setup(self, with_col_aliases: bool = False) -> Any:
        features = self.connection.features
        if self.query.distinct_fields and not features.can_distinct_on_fields:
            raise refuse("distinct() on fields", "use values(*fields).distinct()")
        self.columns: list[Column] = []
        self.order_keys: list[OrderKey] = []
        self.distinct_columns: list[int] = []
        self.group_columns: list[int] = []
        self.partials: list[Partial] = []
        self.pk_column: int | None = None
        self.merges_groups = False
        self._group_expressions = ()

        extra, order_by, group_by = super().pre_sql_setup(with_col_aliases)
        if self.qualify:
            raise refuse("a filter on a window function", "filter in Python, or ask one shard")
        grouped = self.query.group_by is not None
        # Leave out Meta.ordering if the query has a GROUP BY, because Django does so, too.
        ordered = [] if grouped and self._meta_ordering else list(order_by)
        self._added: list[Any] = list(extra)
        self._sql = [_hashable(s[1]) for s in [*self.select, *extra]]
        self.columns = self._select_columns(extra)

        if self.options.summary:
            self.merges_groups = True
            for index, (expression, _, _) in enumerate(self.select):
                self._add_partial(index, expression)
        elif grouped and not self.options.existence:
            self._set_up_groups()
        elif grouped and self.having and not self._groups_are_local():
            raise self._refuse_having()
        if self.query.distinct and self.merges_groups:
            raise refuse("distinct() on groups", "drop distinct(): groups are distinct")
        is_distinct = self.query.distinct and not self.query.distinct_fields
        if is_distinct and not self._has_pk(range(len(self.columns))):
            expressions = [expression for expression, _, _ in self.select]
            for expression in expressions:
                refuse_time_and_chance(expression)
            # Check ``extra``, too: DISTINCT also compares columns that ORDER BY adds to the SELECT.
            self._refuse_ids_of_shards([*expressions, *(expression for expression, _, _ in extra)])
            self.distinct_columns = list(range(len(self.columns)))
        for resolved, (sql, _, _) in ordered:
            # mypy does not know that Django has resolved each entry of ORDER BY to an OrderBy.
            self._add_order_key(resolved, sql)  # type: ignore[arg-type] # it is an expression
        if self.query.distinct_fields and not self.options.existence:
            self._set_up_distinct_on([order.expression for order, _ in ordered])
        if self.options.with_pk:
            self.pk_column = self._column(self.query.model._meta.pk.get_col(self._base_alias))
        # Drop the ORDER BY where it is not needed:
        #
        # - A statement for one shard (marks_rows is False) keeps it.
        # - Under UNION ALL, an outer SELECT sorts all rows. So each SELECT keeps its ORDER BY only
        #   if it has a LIMIT, or DISTINCT ON, which keeps the first row in the order.
        # - If the merge combines groups, none is kept, because the merge then sorts the groups.
        keep_order = (
            self.options.limit is not None or not self.marks_rows or self.query.distinct_fields
        ) and not self.merges_groups
        if self.marks_rows and not self.options.counted:
            # Add the shard's index as the last column. ORDER BY and GROUP BY may refer to the other
            # columns by position, so these positions must not change.
            self._added.append((None, (SHARD_MARK, ()), "__scatter_shard"))
        compares = self.query.distinct or (grouped and not self.options.summary)
        if self.marks_rows and not compares and features_of(self.connection).computes_beyond_types:
            # A UNION would change large rounded floats, so change their type. Do not do so if the
            # values are compared, for example for DISTINCT. In this case, a single database also
            # changes the floats, and the result must be the same.
            self.select, self._added = widened(self.select), widened(self._added)
        return self._added, (ordered if keep_order else []), group_by

    def get_extra_select(self, order_by: Any, select: Any) -> Any:
        """Return the expressions of ORDER BY that a DISTINCT query must select as extra columns.

        Django's method selects the whole SQL of an ORDER BY entry. On a database without NULLS
        FIRST, this SQL has two columns: whether the expression is NULL, and the expression. This
        method selects only the second. DISTINCT finds the same rows without the first column,
        because its value depends on the expression alone.
        """
        if not self.query.distinct or self.query.distinct_fields:
            return []
        extra = []
        selected = [_hashable(sql) for _, sql, _ in select]
        for order, (_, _, is_ref) in order_by:
            if is_ref:
                continue
            whole = order.expression
            for part in columns_in(whole):
                sql = self._compile_selected(part)
                if _hashable(sql) not in selected:
                    selected.append(_hashable(sql))
                    extra.append((part, self._select_format(part, sql), None))
        return extra

    @property
    def _base_alias(self) -> str:
        return self.query.get_initial_alias()

    def _select_columns(self, extra: Sequence[Any]) -> list[Column]:
        columns: list[Column] = []
        for expression, _, _ in [*self.select, *extra]:
            columns += map(self._described, columns_in(expression))
        if len(columns) != len(self.select) + len(extra):
            # A composite primary key is one expression with several columns. So store the SQL of
            # each of its columns.
            self._sql = []
            for expression, sql, _ in [*self.select, *extra]:
                if isinstance(expression, ColPairs):
                    self._sql += [_hashable(self.compile(c)) for c in expression.get_cols()]
                else:
                    self._sql.append(_hashable(sql))
            self.col_count = len(columns) - len(extra)
        return columns

    def _column(self, expression: Any) -> int:
        """Return the number of the column that selects ``expression``; add the column if it is missing."""
        while isinstance(expression, Ref):
            expression = expression.get_source_expressions()[0]
        sql = self._compile_selected(expression)
        key = _hashable(sql)
        if key in self._sql:
            return self._sql.index(key)
        if self.query.distinct and not self.query.distinct_fields:
            raise refuse("distinct() with this order", "order by columns that are selected")
        alias = f"__scatter{len(self.columns)}"
        self._added.append((expression, self._select_format(expression, sql), alias))
        self._sql.append(key)
        self.columns.append(self._described(expression))
        return len(self.columns) - 1

    def _select_format(self, expression: Any, sql: Any) -> Any:
        # Only the server and the merge read a column that ORDER BY adds, so its type may be unknown
        # to Django. In this case, do not call select_format(), which would raise an error.
        return expression.select_format(self, *sql) if has_field(expression) else sql

    def _described(self, expression: Any) -> Column:
        if features_of(self.connection).computes_beyond_types and not isinstance(expression, Col):
            refuse_narrow(expression)
            refuse_scores(expression)
        return column_of(expression)

    def _compile_selected(self, expression: Any) -> Any:
        """Return the SQL of an expression in the select list, as ``SQLCompiler.get_select()`` does.

        For a subquery that certainly has no rows, Django raises EmptyResultSet. Then return the
        value that Django uses instead, such as 0 for a count, because the whole query may still
        have rows.
        """
        try:
            return self.compile(expression)
        except EmptyResultSet:
            value = getattr(expression, "empty_result_set_value", NotImplemented)
            return ("0", ()) if value is NotImplemented else self.compile(Value(value))
        except FullResultSet:
            return self.compile(Value(True))

    def _add_order_key(self, order: OrderBy, sql: str) -> None:
        expression = self._ordered_by(order.expression)
        if any(map(is_chance, parts_of(expression))):
            raise refuse("random order", "choose random rows in Python, or ask one shard")
        if any(map(is_time, parts_of(expression))):
            raise refuse(
                "an order that depends on Now()", "pass the time as a value (timezone.now())"
            )
        # If the query does not say whether NULLs come first or last, they come where the database
        # puts them by default.
        nulls_first = order.descending != self.connection.features.order_by_nulls_first
        for part in columns_in(expression):
            column = self._column(part)
            if self.merges_groups:
                self._check_group_column(column, part)
            self.order_keys.append(
                OrderKey(
                    column,
                    descending=order.descending,
                    nulls_first=True
                    if order.nulls_first
                    else False
                    if order.nulls_last
                    else nulls_first,
                )
            )

    def _ordered_by(self, expression: Any) -> Any:
        """Return what an entry of ORDER BY refers to.

        If the entry is the position of a column, the database counts each column. But Django counts
        a composite primary key, which has several columns, as one. Count as the database does,
        because it sorts the rows by the column that it finds.
        """
        position = expression.ordinal if isinstance(expression, PositionRef) else None
        while isinstance(expression, Ref):
            expression = expression.get_source_expressions()[0]
        if position is None or isinstance(expression, ColPairs):
            return expression
        return self._selected_columns()[position - 1]

    def _selected_columns(self) -> list[Any]:
        """Return the expression of each column that the queryset itself selects."""
        return [column for expression, _, _ in self.select for column in columns_in(expression)]

    def _set_up_distinct_on(self, ordered_by: Sequence[Any]) -> None:
        """Set the columns of DISTINCT ON.

        Among rows that are equal in these columns, the database keeps the first one in the order of
        the query. This order must begin with these columns. The merge puts the rows of all shards
        into this order, and keeps the first one, too.
        """
        refuse_distinct_keys(self.query)
        # Count the different fields, because the query must be ordered by at least as many columns:
        # DISTINCT ON (a, b, a) has two. get_distinct() returns the SQL of each field, and a list of
        # parameters for each field that has parameters.
        texts, params_of_fields = self.get_distinct()
        params = iter([param for params in params_of_fields for param in params])
        fields = len({
            (text, *(repr(next(params)) for _ in range(text.replace("%%", "").count("%s"))))
            for text in texts
        })  # fmt: skip
        if len(self.order_keys) < fields:
            raise refuse(
                "distinct() on fields by which it is not ordered",
                "let order_by() begin with these fields",
            )
        self.distinct_columns = [key.column for key in self.order_keys[:fields]]
        self._refuse_ids_of_shards(ordered_by[:fields])

    # -- Groups

    def collapse_group_by(self, expressions: Any, having: Any) -> Any:
        collapsed = super().collapse_group_by(expressions, having)
        self._group_expressions = [column for each in collapsed for column in columns_in(each)]
        return collapsed

    def _has_pk(self, columns: Any) -> bool:
        """Whether the columns at the positions ``columns`` contain the whole primary key.

        If so, rows from different shards count as different, and DISTINCT need not compare them.
        """
        pks = {f.column for f in self.query.model._meta.pk_fields}
        selected = {
            c.name
            for c in (self.columns[i] for i in columns)
            if c.alias == self._base_alias and c.name in pks
        }
        return selected == pks

    def _groups_are_local(self) -> bool:
        """Whether all rows of each group of GROUP BY are on one shard.

        This is true if GROUP BY contains the primary key or the shard key.
        """
        pks = {f.column for f in self.query.model._meta.pk_fields}
        expressions = self._group_expressions
        return pks <= self._own_columns(expressions) or self._have_shard_key(expressions)

    def _have_shard_key(self, expressions: Iterable[Any]) -> bool:
        """Whether rows of different shards always differ in one of ``expressions``.

        This is so if the columns of the shard key are among ``expressions``.
        """
        local = self.options.local_columns
        return bool(local) and local <= self._own_columns(expressions)

    def _own_columns(self, expressions: Iterable[Any]) -> set[str | None]:
        """Return the names of the columns of the base table that are among ``expressions``."""
        return {
            expression.target.column
            for expression in expressions
            if isinstance(expression, Col) and expression.alias == self._base_alias
        }

    def _refuse_ids_of_shards(self, expressions: Sequence[Any]) -> None:
        """Raise an error if rows would be compared by ids that are unique only within their shard."""
        if not self._have_shard_key(expressions):
            refuse_comparison(expressions)

    def _refuse_having(self) -> Exception:
        return refuse(
            "a filter on an aggregate of groups that span shards",
            "group by the shard key or the primary key, or filter the result in Python",
        )

    def _set_up_groups(self) -> None:
        if self._groups_are_local():
            return
        if self.having:
            raise self._refuse_having()
        self.merges_groups = True
        self._refuse_ids_of_shards(self._group_expressions)
        for expression in self._group_expressions:
            refuse_time_and_chance(expression)
            column = self._column(expression)
            if column not in self.group_columns:
                self.group_columns.append(column)
        for index, expression in enumerate(self._selected_columns()):
            if getattr(expression, "contains_aggregate", False):
                self._add_partial(index, expression)
            elif any(getattr(part, "subquery", False) for part in parts_of(expression)):
                raise refuse("a subquery selected with groups", "group by plain columns")

    def _add_partial(self, index: int, expression: Any) -> None:
        self.partials.append(
            partial_of(index, expression, self._column, features_of(self.connection))
        )

    def _check_group_column(self, column: int, expression: Any) -> None:
        if column in self.group_columns or any(p.column == column for p in self.partials):
            return
        if getattr(expression, "contains_aggregate", False):
            self._add_partial(column, expression)
            return
        raise refuse(
            "groups ordered by an expression that is neither a group's column nor an aggregate",
            "annotate the expression and group by it",
        )


def _hashable(sql: Any) -> tuple[str, tuple[Any, ...]]:
    text, params = sql
    return text, tuple(map(repr, params))
