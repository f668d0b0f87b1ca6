"""The plan of a read: SQL that Django has compiled once for all queries of one shape.

Queries of one shape differ only in the values of their conditions. A plan is made from a query that
Django has built. It binds the values, sends the SQL and makes instances of the rows. So it sends
the same SQL with the same parameters as Django, and returns the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

from django.db.models import Count
from django.db.models.expressions import Col
from django.db.models.sql import Query
from django.db.models.sql.where import WhereNode

from sharded_orm.backends import key_guard
from sharded_orm.cache.values import Row
from sharded_orm.models.plans.conditions import MODULES_OF_LOOKUPS, ValueForm
from sharded_orm.models.plans.declarations import Declarations
from sharded_orm.models.plans.instances import loader_of
from sharded_orm.models.plans.joined_instances import JoinedInstances
from sharded_orm.models.plans.prepared_values import is_sent_unchanged
from sharded_orm.models.plans.selection import EVERYTHING

if TYPE_CHECKING:
    from sharded_orm.models.plans.shapes import Recording, Shape

#: The kinds of reads. ``ROWS`` reads all rows of a query, and ``GET`` the one row of ``get()``.
#: ``EXISTS`` and ``COUNT`` stand for ``exists()`` and ``count()``.
ROWS, GET, EXISTS, COUNT = "rows", "get", "exists", "count"

#: Returned by a read that cannot be done by the plan or the cache. The caller must then let Django
#: do it.
UNREAD: Any = object()

# The text that is added to the SQL for each value of a list after the first. For two values, IN
# (%s) becomes IN (%s, %s).
_FURTHER = ", %s"


class ReadCache(Protocol):
    """The interface through which a plan reads the results of its queries from the cache."""

    def is_current(self) -> bool:
        """Whether the cache settings of the model have not changed since this object was made."""

    def read(
        self,
        queryset: Any,
        values: Sequence[Any],
        limits: tuple[int, int | None] | None,
        connection: Any,
        query_database: Callable[[], Any],
    ) -> Any:
        """Return the result of a read. Return :data:`UNREAD` if the cache must not be used now.

        :param values: one value for each condition, prepared by the condition's field.
        :param query_database: called if the result is not in the cache. It queries the database,
            and returns the rows as the driver returns them. For :data:`EXISTS` and :data:`COUNT`,
            it returns the value.
        """

    def prepare(
        self,
        queryset: Any,
        values: Sequence[Any],
        limits: tuple[int, int | None] | None,
        connection: Any,
        query_database: Callable[[], Any],
    ) -> Any:
        """Prepare a :meth:`read`, for a caller that then asks the cache for several reads at once.

        Return None if the cache must not be used now.
        """


class Plan:
    """The SQL of one kind of read, for queries that differ only in their values.

    Immutable but for :attr:`uses`, and thread-safe.

    :param sql: the SQL without a LIMIT. If a condition compares with a list, this is the SQL for a
        list of one value.
    :param list_end: the position in ``sql`` where the placeholders of further list values are
        added. None if no condition compares with a list.
    :param constants: the first parameters, which are the same for all these queries.
    :param fixed: maps the position of a condition to its parameters, for conditions whose value is
        a part of the shape, such as ``deleted=False``.
    :param names: the attnames of the selected fields; None for all fields of the model.
    :param joined: makes the instances of ``select_related()``; None if the rows are of one table.
    :param declarations: the declarations from which the SQL was made.
    :param connection: a connection. Only connections of the same class may use the plan.
    :param cache: finds the results in a cache; None if these queries are never cached.
    """

    __slots__ = (
        "_backend", "_conditions", "_constants", "_declarations", "_is_guarded", "_is_simple", "_joined",
        "_list_end", "_lists", "_loader_key", "_ranges", "_selection", "_single", "_unchanged", "cache", "model",
        "sql", "tables", "uses",
    )  # fmt: skip

    def __init__(
        self,
        sql: str,
        list_end: int | None,
        constants: tuple[Any, ...],
        fixed: dict[int, tuple[Any, ...]],
        shape: Shape,
        names: tuple[str, ...] | None,
        joined: JoinedInstances | None,
        declarations: Declarations,
        connection: Any,
        cache: ReadCache | None = None,
    ) -> None:
        self.sql = sql
        self.cache = cache
        #: How often the plan was used in this process. Threads that use it at the same moment may be
        #: counted once.
        self.uses = 0
        self.model = shape.model
        self._backend = type(connection)
        self._constants = constants
        self._list_end = list_end
        self._selection = shape.selection
        self._loader_key = shape.model, names, joined
        self._joined = joined
        # Whether each result is a model instance made from columns of one table.
        self._is_simple = shape.selection.makes_instances and joined is None
        #: The tables that the SQL reads, first that of the model.
        self.tables = (shape.model._meta.db_table,) if joined is None else joined.tables
        self._declarations = declarations
        # A tuple for each condition, from which its parameters are made. The last item of a tuple
        # is a type: values of exactly this type are sent to the database without a conversion. It
        # is None if all values must be converted.
        self._conditions = [
            (part.target, part.form, fixed.get(position, ()), _unchanged_type(part, connection))
            for position, part in enumerate(shape.conditions)
        ]
        # The types of the values, if all conditions take one value of a type that needs no
        # conversion. If the values of a read have exactly these types, they are sent as they are.
        # None if there is another condition, such as one with a list.
        kinds = [unchanged for _, form, _, unchanged in self._conditions if form is ValueForm.VALUE]
        is_unchanged = len(kinds) == len(self._conditions) and None not in kinds
        self._unchanged = tuple(kinds) if is_unchanged else None
        # Whether the tables have shard keys that are text.
        shard = getattr(connection, "shard", None)
        self._is_guarded = shard is not None and key_guard.guards(shard.group, self.tables)
        # The positions of conditions on integer columns, with the smallest and the largest number
        # that the column can store.
        self._ranges = [
            (position, *bounds)
            for position, part in enumerate(shape.conditions)
            if part.form is ValueForm.VALUE
            and (bounds := _bounds(part.target, connection)) is not None
        ]
        self._lists = [
            (position, _bounds(part.target, connection))
            for position, part in enumerate(shape.conditions)
            if part.form is ValueForm.LIST
        ]
        # The number of parameters of the SQL, if the list in it has one value.
        self._single = len(constants) + sum(
            len(fixed[position]) if part.form is ValueForm.FIXED else 1
            for position, part in enumerate(shape.conditions)
        )

    def fits(self, connection: Any) -> bool:
        """Whether the plan may be used on ``connection``.

        If not, it was made for other connections, or a model, a field or the cache was changed since.
        """
        return (
            type(connection) is self._backend
            and self._declarations.are_current()
            and (self.cache is None or self.cache.is_current())
        )

    def accepts(self, values: Sequence[Any]) -> bool:
        """Whether the plan can be used for these values.

        False if a number is out of the range of its column, or if None is in a list, because
        Django's SQL differs for such values.

        :param values: one value for each condition, prepared by the condition's field.
        """
        for position, low, high in self._ranges:
            if not low <= values[position] <= high:
                return False
        for position, bounds in self._lists:
            listed = values[position]
            if None in listed:
                return False
            if bounds is not None and not bounds[0] <= min(listed) <= max(listed) <= bounds[1]:
                return False
        return True

    def parameters(self, values: Sequence[Any], connection: Any) -> list[Any] | None:
        """Return the parameters of the SQL for ``values``, as Django's lookups make them.

        Return None if the plan does not accept the values, see :meth:`accepts`.
        """
        return self._bound(values, connection) if self.accepts(values) else None

    def _bound(self, values: Sequence[Any], connection: Any) -> list[Any]:
        """Do :meth:`parameters`, for values for which :meth:`accepts` is True."""
        parameters = [*self._constants]
        for (target, form, fixed, unchanged), value in zip(self._conditions, values, strict=True):
            if type(value) is unchanged:
                parameters.append(value)
            elif form is ValueForm.FIXED:
                parameters += fixed
            elif form is ValueForm.LIST:
                parameters += [
                    item
                    if type(item) is unchanged
                    else target.get_db_prep_value(item, connection, prepared=True)
                    for item in value
                ]
            else:
                # As FieldGetDbPrepValueMixin.get_db_prep_lookup().
                parameters.append(target.get_db_prep_value(value, connection, prepared=True))
        return parameters

    def statement(
        self, parameters: Sequence[Any], limits: tuple[int, int | None] | None, connection: Any
    ) -> str:
        """Return the SQL for ``parameters``, which :meth:`parameters` has returned."""
        sql = self.sql
        if self._list_end is not None and (further := len(parameters) - self._single):
            sql = sql[: self._list_end] + _FURTHER * further + sql[self._list_end :]
        if limits is None:
            return sql
        # Append the LIMIT as SQLCompiler.as_sql() does.
        return f"{sql} {connection.ops.limit_offset_sql(*limits)}"

    def read(
        self,
        kind: str,
        queryset: Any,
        values: Sequence[Any],
        limits: tuple[int, int | None] | None,
        connection: Any,
    ) -> Any:
        """Return the rows as a list, or for :data:`EXISTS` or :data:`COUNT` the value.

        Return :data:`UNREAD` if the plan cannot be used for these values. Call this only if the plan
        :meth:`fits` the connection. The result is read through the cache, if the plan has one.
        Sends at most one query.

        :param kind: the kind of read for which the plan was made.
        :param queryset: the queryset for which the instances are made.
        :param values: one value for each condition, prepared by the condition's field.
        :param limits: the slice as two row numbers, counted from 0: its first row, and the row
            after its last row.
        """
        if not self.accepts(values):
            return UNREAD
        self.uses += 1
        is_value = kind is EXISTS or kind is COUNT
        if self.cache is not None:
            query_database = partial(self._query, values, limits, connection, is_value=is_value)
            result = self.cache.read(queryset, values, limits, connection, query_database)
            if result is not UNREAD:
                return result
        result = self._query(values, limits, connection, is_value=is_value)
        return result if is_value else self._results(result, connection, queryset)

    def prepare(
        self,
        queryset: Any,
        values: Sequence[Any],
        limits: tuple[int, int | None] | None,
        connection: Any,
    ) -> Any:
        """Prepare a read of rows through the cache. Sends nothing.

        Return None if the cache must not be used. Return :data:`UNREAD` if the plan cannot be used
        for these values. The arguments are those of :meth:`read`.
        """
        if not self.accepts(values):
            return UNREAD
        if self.cache is None:
            return None
        self.uses += 1
        query = partial(self._query, values, limits, connection, is_value=False)
        return self.cache.prepare(queryset, values, limits, connection, query)

    def _query(
        self,
        values: Sequence[Any],
        limits: tuple[int, int | None] | None,
        connection: Any,
        *,
        is_value: bool,
    ) -> Any:
        """Send one query. Return its rows as the driver returns them, or its one value.

        :param is_value: whether the query is a count() or exists().
        """
        shard = getattr(connection, "shard", None)
        if self._is_guarded and shard is not None:
            # Check that the database compares text keys exactly. If Django sends the query, the SQL
            # compiler of the shards makes this check; a plan uses no compiler.
            key_guard.check(connection, (shard,), self.tables)
        if tuple(map(type, values)) == self._unchanged:
            parameters = (*self._constants, *values)
        else:
            parameters = tuple(self._bound(values, connection))
        sql = self.statement(parameters, limits, connection)
        if shard is not None and connection.read_rows is not None:
            rows = connection.read_rows(sql, parameters)
            if rows is not None:
                if not is_value:
                    return rows
                return rows[0][0] if rows else None
        with connection.cursor() as cursor:
            cursor.execute(sql, parameters)
            if not is_value:
                return cursor.fetchall()
            row = cursor.fetchone()
        return None if row is None else row[0]

    def _results(self, rows: Sequence[Row], connection: Any, queryset: Any) -> list[Any]:
        if not rows:
            return []
        loader = loader_of(self._loader_key, connection)
        if self._is_simple:
            instances = loader.loaded(rows, queryset)
        elif self._joined is None:
            return self._selection.results(loader.converted(rows), loader.names)
        else:
            converted = loader.converted(rows)
            instances = self._joined.instances(converted, queryset, connection.alias)
        if queryset._known_related_objects:
            _relate(instances, queryset)
        return instances


def _unchanged_type(part: Any, connection: Any) -> type | None:
    """Return ``int`` or ``str`` if Django sends values of this type unchanged, otherwise None.

    :param part: the condition with which the values are compared.
    """
    return next(
        (kind for kind in (int, str) if is_sent_unchanged(part.target, kind, connection)), None
    )


def _bounds(field: Any, connection: Any) -> tuple[int, int] | None:
    """Return the smallest and the largest number that the column can store.

    Return None if the column stores no integers. A plan must not be used for a number out of this
    range, because Django's lookups (IntegerFieldOverflow) make other SQL for it, or no SQL at all.
    """
    low, high = None, None
    if field.get_internal_type() in connection.ops.integer_field_ranges:
        low, high = connection.ops.integer_field_range(field.get_internal_type())
    return None if low is None or high is None else (low, high)


def _relate(instances: list[Any], queryset: Any) -> None:
    """Set the related objects that the queryset knows already on ``instances``.

    For example, each photo of ``album.photos.all()`` gets ``album`` as its album, without a query.
    Django's ModelIterable does the same.
    """
    meta = queryset.model._meta
    for field, known in queryset._known_related_objects.items():
        key_of = attrgetter(
            *(
                field.attname if name == "self" else meta.get_field(name).attname
                for name in field.from_fields
            )
        )
        for instance in instances:
            if not field.is_cached(instance):
                related = known.get(key_of(instance))
                if related is not None:
                    setattr(instance, field.name, related)


def compile_plan(
    kind: str,
    shape: Shape,
    examples: Sequence[tuple[Query, Recording]],
    declarations: Declarations,
    connection: Any,
    cache: ReadCache | None = None,
) -> Plan | None:
    """Compile the plan of the queries of ``shape``, to be used again with other values. Sends nothing.

    Return None if it is unclear which parameter of the SQL belongs to which condition, or if a part
    of the SQL may depend on a value.

    :param kind: :data:`ROWS`, :data:`GET`, :data:`EXISTS` or :data:`COUNT`.
    :param examples: pairs of a query without limits and the recorded calls that have built it. The
        values in a query all differ. If a condition compares with a list, there are several
        examples: with a list of one value, of two, and so on. This function changes the queries.
    :param declarations: the declarations of the models before the examples were made.
    :param cache: finds the results in a cache; None if these queries are never cached.
    """
    if not all(is_plain_query(query) for query, _ in examples):
        return None
    compilers = [_compiler(kind, query, connection) for query, _ in examples]
    statements = [compiler.as_sql() for compiler in compilers]
    sql, parameters = statements[0]
    names = joined = None
    if kind in (ROWS, GET) and shape.selection.joins:
        joined = JoinedInstances(compilers[0])
        if not joined.is_plain(shape.model):
            return None
    elif kind in (ROWS, GET):
        columns = [column for column, _, _ in compilers[0].select]
        targets: list[Any] = [getattr(column, "target", None) for column in columns]
        if set(map(type, columns)) != {Col} or not shape.selection.selects(shape.model, targets):
            return None
        if shape.selection is not EVERYTHING:
            names = tuple(target.attname for target in targets)
    list_end = end_of_list(shape, [sql for sql, _ in statements])
    # The SQL of exists() begins with SELECT 1, and this 1 is a parameter.
    constants = tuple(parameters[:1]) if kind == EXISTS else ()
    fixed = fixed_parameters(shape, examples[0][1].values, compilers[0])
    plan = Plan(
        sql, list_end, constants, fixed, shape, names, joined, declarations, connection, cache
    )
    for (_, recording), (sql, parameters) in zip(examples, statements, strict=True):
        expected = plan.parameters(recording.values, connection)
        if expected is None or list(parameters) != expected:
            return None
        if list(map(type, parameters)) != list(map(type, expected)):
            return None
        if plan.statement(expected, None, connection) != sql:
            return None
    return plan


def end_of_list(shape: Shape, statements: Sequence[str]) -> int | None:
    """Return the position in the SQL at which the values of a list end; None if there is no list.

    :param statements: the SQL for lists of one value, of two, and so on.
    """
    if not shape.has_list:
        return None
    # The SQL for a list of two values has one placeholder more than that for one value. It is at
    # the position where the two texts begin to differ.
    pairs = enumerate(zip(*statements[:2], strict=False))
    return next((position for position, (left, right) in pairs if left != right), None)


def _compiler(kind: str, query: Query, connection: Any) -> Any:
    if kind in (GET, COUNT):
        query.clear_ordering(force=True)
    if kind == COUNT:
        # These lines do what Query.get_aggregation() does with a query that has neither a limit nor
        # an aggregate.
        query.add_annotation(Count("*"), "__count")
        query.set_annotation_mask(["__count"])
        query.default_cols = False
    elif kind == EXISTS:
        query = query.exists(limit=False)
    return query.get_compiler(using=connection.alias)


def fixed_parameters(
    shape: Shape, values: Sequence[Any], compiler: Any
) -> dict[int, tuple[Any, ...]]:
    """Return the parameters of the conditions whose values are a part of the shape.

    The result maps the position of a condition to its parameters. For example, ``deleted=False`` at
    position 1 gives ``{1: (False,)}`` on MySQL, but ``{1: ()}`` on PostgreSQL, where Django's SQL
    is ``NOT deleted``.
    """
    parameters = {}
    for position, part in enumerate(shape.conditions):
        if part.form is ValueForm.FIXED:
            column = part.field.get_col(shape.model._meta.db_table)
            lookup = part.field.get_lookup(part.lookup)(column, values[position])
            parameters[position] = tuple(compiler.compile(lookup)[1])
    return parameters


def is_plain_query(query: Query) -> bool:
    """Whether all conditions of ``query`` compare columns of one table by Django's lookups."""
    # Exclude models with parents (multi-table inheritance), because some of their columns are in
    # another table.
    return _is_plain(query.where) and not any(query.get_meta().parents.values())


def _is_plain(node: Any) -> bool:
    """Whether ``node`` has only lookups of Django that compare a column with a value."""
    if isinstance(node, WhereNode):
        return all(map(_is_plain, node.children))
    return type(node).__module__ in MODULES_OF_LOOKUPS and type(node.lhs) is Col
