"""The plan of a read: SQL that Django has compiled once for all queries of one shape.

Queries of one shape differ only in the values of their conditions. A plan is made from a query that
Django has built. To run the plan, it is enough to bind the values, send the SQL and make instances
of the rows. So a plan sends the same SQL with the same parameters as Django, and returns the same
result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.db.models import Count, lookups
from django.db.models.expressions import Col
from django.db.models.fields import related_lookups
from django.db.models.sql import Query

from sharded_orm.models.plans.instances import InstanceLoader

if TYPE_CHECKING:
    from sharded_orm.models.plans.shapes import Condition

#: The kinds of reads: all rows of a query, the one row of ``get()``, ``exists()`` and
#: ``count()``.
ROWS, GET, EXISTS, COUNT = "rows", "get", "exists", "count"

_LOADERS = "_sharded_orm_loaders"
MODULES_OF_LOOKUPS = (lookups.__name__, related_lookups.__name__)


class Plan:
    """The SQL of one kind of read, for queries that differ only in their values.

    Immutable and thread-safe.

    :param sql: the SQL without a LIMIT.
    :param constants: the first parameters, which are the same for all these queries.
    :param conditions: the conditions whose values are the other parameters, in order.
    :param model: the model of the rows.
    :param connection: a connection whose class is that of all connections that may use the plan.
    """

    __slots__ = (
        "_bounds", "_conditions", "_constants", "_meta", "_order", "backend", "model", "sql", "tables",
    )  # fmt: skip

    def __init__(
        self,
        sql: str,
        constants: tuple[Any, ...],
        conditions: Sequence[Condition],
        model: Any,
        connection: Any,
    ) -> None:
        self.sql = sql
        self.model = model
        #: The class of the connections on which the plan may be used.
        self.backend = type(connection)
        self._constants = constants
        self._meta = model._meta
        # Keep a copy of the list, so that parameters() notices if Meta.ordering was changed in place.
        self._order = list(self._meta.ordering)
        #: The one table that the SQL reads.
        self.tables = (self._meta.db_table,)
        self._conditions = [
            (part.field, part.target, part.lookup, part.field.get_lookups()[part.lookup])
            for part in conditions
        ]
        self._bounds = [_bounds(part.target, connection) for part in conditions]

    def parameters(self, values: Sequence[Any], connection: Any) -> list[Any] | None:
        """Return the parameters of the SQL for ``values``, as Django's lookups make them.

        Return None if the plan cannot be used. This is so if a number is too large for its column,
        because the SQL would differ, or if the model or a field was changed since the plan was made.

        :param values: one value for each condition, prepared by the condition's field.
        """
        if self._meta.db_table != self.tables[0] or list(self._meta.ordering) != self._order:
            return None
        parameters = [*self._constants]
        for (field, target, name, lookup), bounds, value in zip(
            self._conditions, self._bounds, values, strict=True
        ):
            if bounds is not None and not bounds[0] <= value <= bounds[1]:
                return None
            if field.get_lookups().get(name) is not lookup:
                return None
            # As FieldGetDbPrepValueMixin.get_db_prep_lookup().
            parameters.append(target.get_db_prep_value(value, connection, prepared=True))
        return parameters

    def rows(
        self,
        parameters: list[Any],
        connection: Any,
        queryset: Any,
        limits: tuple[int, int | None] | None,
    ) -> list[Any]:
        """Send one query and return the instances of its rows.

        :param queryset: the queryset for which the instances are made.
        :param limits: the slice as two row numbers, counted from 0: its first row, and the row
            after its last row.
        """
        with connection.cursor() as cursor:
            cursor.execute(self._with_limit(limits, connection), tuple(parameters))
            rows = cursor.fetchall()
        if not rows:
            return []
        loader = loader_of(self.model, connection)
        return loader.instances(loader.values(rows), queryset)

    def scalar(
        self, parameters: list[Any], connection: Any, limits: tuple[int, int | None] | None
    ) -> Any:
        """Send one query and return the first column of the first row; None if there is no row."""
        with connection.cursor() as cursor:
            cursor.execute(self._with_limit(limits, connection), tuple(parameters))
            row = cursor.fetchone()
        return None if row is None else row[0]

    def _with_limit(self, limits: tuple[int, int | None] | None, connection: Any) -> str:
        # As SQLCompiler.as_sql().
        if limits is None:
            return self.sql
        return f"{self.sql} {connection.ops.limit_offset_sql(*limits)}"


def _bounds(field: Any, connection: Any) -> tuple[int, int] | None:
    """Return the smallest and the largest number that the column can store.

    Return None if the column stores no numbers. For a number out of this range, Django's lookups
    (IntegerFieldOverflow) generate other SQL, or no query is sent.
    """
    low, high = None, None
    if field.get_internal_type() in connection.ops.integer_field_ranges:
        low, high = connection.ops.integer_field_range(field.get_internal_type())
    return None if low is None or high is None else (low, high)


def loader_of(model: Any, connection: Any) -> InstanceLoader:
    """Return the loader, which makes instances of ``model`` from rows that ``connection`` has read."""
    # Keep the loaders in an attribute of the connection, because each loader uses its connection.
    # USE_TZ is part of the key of this dict, because MySQL's converters depend on USE_TZ.
    loaders = connection.__dict__.setdefault(_LOADERS, {})
    key = model, settings.USE_TZ
    loader: InstanceLoader | None = loaders.get(key)
    if loader is None:
        loader = loaders[key] = InstanceLoader(model, connection)
    return loader


def compile_plan(
    kind: str,
    query: Query,
    conditions: Sequence[Condition],
    values: Sequence[Any],
    connection: Any,
) -> Plan | None:
    """Compile the plan of ``query``: its SQL, to be used again with other values. Sends nothing.

    Return None if it is unclear which parameter of the SQL belongs to which condition, or if a part
    of the SQL may depend on a value.

    :param kind: :data:`ROWS`, :data:`GET`, :data:`EXISTS` or :data:`COUNT`.
    :param query: a query without limits. It is changed.
    :param conditions: the conditions of the query.
    :param values: the prepared values of the conditions in this query. No two of them are equal.
    """
    if not is_plain_query(query):
        return None
    if kind in (GET, COUNT):
        query.clear_ordering(force=True)
    constants = 0
    if kind == COUNT:
        # These lines do what Query.get_aggregation() does with a query that has neither a limit nor
        # an aggregate.
        query.add_annotation(Count("*"), "__count")
        query.set_annotation_mask(["__count"])
        query.default_cols = False
    elif kind == EXISTS:
        query, constants = (
            query.exists(limit=False),
            1,
        )  # One parameter is constant: the 1 in SELECT 1.
    compiler = query.get_compiler(using=connection.alias)
    sql, parameters = compiler.as_sql()
    model: Any = query.model
    plan = Plan(sql, tuple(parameters[:constants]), conditions, model, connection)
    expected = plan.parameters(values, connection)
    if expected is None or list(parameters) != expected:
        return None
    if list(map(type, parameters)) != list(map(type, expected)):
        return None
    if kind in (ROWS, GET):
        targets = [getattr(column, "target", None) for column, _, _ in compiler.select]
        if targets != list(model._meta.concrete_fields):
            return None
    return plan


def is_plain_query(query: Query) -> bool:
    """Whether all conditions of ``query`` compare columns of one table by lookups of Django."""
    # If the model has parents, some of its columns are in other tables.
    return all(map(_is_plain, query.where.children)) and not any(query.get_meta().parents.values())


def _is_plain(lookup: Any) -> bool:
    """Whether ``lookup`` is a lookup of Django that compares a column with a value."""
    return type(lookup).__module__ in MODULES_OF_LOOKUPS and type(lookup.lhs) is Col
