"""The plan of an UPDATE: SQL that Django has compiled once, to be used again with other values.

Two UPDATEs share a plan if they have the same conditions, write the same fields, and have new
values of the same types. Django would compile both to the same statement.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.conf import settings
from django.db.models import BinaryField, DateTimeField
from django.db.models.fields.files import FieldFile, ImageFieldFile
from django.db.models.sql import Query, UpdateQuery
from django.utils.timezone import is_aware

from sharded_orm.backends.write_hooks import compiled_update
from sharded_orm.models.plans.declarations import Declarations
from sharded_orm.models.plans.plan import Plan, end_of_list, fixed_parameters, is_plain_query
from sharded_orm.models.plans.prepared_values import is_sent_unchanged, only_adapts_datetimes

if TYPE_CHECKING:
    from sharded_orm.models.plans.shapes import Recording, Shape

#: The types of new values that are certainly plain values. A value of another type may be an
#: expression or a model instance, for which Django compiles different SQL. An instance of a
#: subclass of one of these types may be an expression, too, so a value must have exactly one of
#: these types.
PLAIN_TYPES = frozenset({
    int, str, bool, float, Decimal, datetime, date, time, timedelta, UUID, bytes, dict, list, type(None),
    FieldFile, ImageFieldFile,
})  # fmt: skip


class UpdatePlan:
    """The SQL of an UPDATE, compiled once for all updates that differ only in their values.

    The values of all these updates have the same types. Immutable and thread-safe.

    :param where: makes the SQL of the whole UPDATE, and the parameters of its conditions.
    :param shape: the form of the queries, with the conditions but without their values.
    :param fields: the fields that are written, in the order of the SQL.
    :param kinds: for each of the fields, the type of the value that is sent to the database.
    :param omits_null: True if the SQL contains the word NULL for a new value of None. False if None
        is passed as a parameter.
    :param connection: a connection. Only connections of the same class can use the plan.
    """

    __slots__ = ("_fields", "_omits_null", "_where", "conditions")

    def __init__(
        self,
        where: Plan,
        shape: Shape,
        fields: Sequence[Any],
        kinds: Sequence[type],
        *,
        omits_null: bool,
        connection: Any,
    ) -> None:
        self._where = where
        # One tuple for each field: the field; the type that its prepared value has; the type of new
        # values that need no preparation, or None; and ``datetime`` if only the backend must
        # convert a datetime with a time zone, or None.
        self._fields = [
            (
                field,
                kind,
                kind if is_sent_unchanged(field, kind, connection) else None,
                datetime if only_adapts_datetimes(field) else None,
            )
            for field, kind in zip(fields, kinds, strict=True)
        ]
        self._omits_null = omits_null
        self.conditions = shape.conditions

    def fits(self, connection: Any) -> bool:
        """Return whether the SQL can be run on ``connection``; see :meth:`Plan.fits`."""
        return self._where.fits(connection)

    def execute(
        self, new_values: Sequence[Any], values: Sequence[Any], connection: Any
    ) -> int | None:
        """Send the UPDATE, and return the number of rows that matched.

        Return None, without sending anything, if the plan cannot be used for these values. Call
        this only if the plan :meth:`fits` the connection.

        :param new_values: the values of the written fields, as they are on the instance.
        :param values: one value for each condition, prepared by the condition's field.
        """
        if compiled_update.is_observed(connection, self._where.model):
            return None
        bound = self.bind(new_values, values, connection)
        return None if bound is None else compiled_update.send(connection, *bound)

    def bind(
        self, new_values: Sequence[Any], values: Sequence[Any], connection: Any
    ) -> tuple[str, tuple[Any, ...]] | None:
        """Check the shard keys of the write, and return the SQL and its parameters.

        Return None if the plan cannot be used for these values. The arguments are those of
        :meth:`execute`. Call this only if the plan :meth:`fits` the connection. The caller must
        tell the observers of the model about the write.
        """
        where = self._where
        compiled_update.check_write(connection, where.tables[0])
        parameters = []
        # Prepare each value as the compiler of an UPDATE does.
        for (field, kind, unchanged, adapted), new_value in zip(
            self._fields, new_values, strict=True
        ):
            if type(new_value) is unchanged:
                prepared = new_value
            elif type(new_value) is adapted and is_aware(new_value):
                prepared = connection.ops.adapt_datetimefield_value(new_value)
            else:
                prepared = field.get_db_prep_save(new_value, connection=connection)
            if type(prepared) is not kind:
                return None
            if prepared is not None or not self._omits_null:
                parameters.append(prepared)
        conditions = where.parameters(values, connection)
        if conditions is None:
            return None
        sql = where.statement(conditions, None, connection)
        return sql, (*parameters, *conditions)


def compile_update(
    shape: Shape,
    examples: Sequence[tuple[Query, Recording]],
    new_values: Sequence[tuple[Any, Any]],
    declarations: Declarations,
    connection: Any,
) -> UpdatePlan | None:
    """Compile the plan of an UPDATE. Sends nothing.

    Return None if it is unclear which parameter of the SQL belongs to which field or condition.

    :param shape: the form of the queries, with the conditions of the UPDATE.
    :param examples: queries with these conditions, as for
        :func:`~sharded_orm.models.plans.plan.compile_plan`.
    :param new_values: pairs (field, new value). Each value is of one of :data:`PLAIN_TYPES`.
    :param declarations: the declarations of the model, read before the examples were made. If one
        of them changes later, the plan is no longer used.
    """
    fields = [field for field, _ in new_values]
    if any(has_placeholder(field, connection) for field in fields):
        return None
    compilers = []
    for query, _ in examples:
        if not is_plain_query(query):
            return None
        # Make the UPDATE as the queryset of save() does.
        update: Any = query.chain(UpdateQuery)
        update.add_update_fields([(field, None, value) for field, value in new_values])
        update.annotations = {}
        if [field for field, _, _ in update.values] != fields:
            return None  # Django leaves out generated fields.
        compilers.append(update.get_compiler(using=connection.alias))
    statements = [compiler.as_sql() for compiler in compilers]
    fixed = fixed_parameters(shape, examples[0][1].values, compilers[0])
    list_end = end_of_list(shape, [sql for sql, _ in statements])
    where = Plan(statements[0][0], list_end, (), fixed, shape, None, None, declarations, connection)
    prepared = [field.get_db_prep_save(value, connection=connection) for field, value in new_values]
    if any(hasattr(value, "as_sql") for value in prepared):
        return None
    # Django before 6.1 writes the word NULL into the SQL, and passes no parameter for it.
    without_null = [value for value in prepared if value is not None]
    for omits_null, of_fields in ((True, without_null), (False, prepared)):
        if all(
            (of_conditions := where.parameters(recording.values, connection)) is not None
            and are_same(parameters, [*of_fields, *of_conditions])
            and where.statement(of_conditions, None, connection) == sql
            for (_, recording), (sql, parameters) in zip(examples, statements, strict=True)
        ):
            kinds = list(map(type, prepared))
            return UpdatePlan(
                where, shape, fields, kinds, omits_null=omits_null, connection=connection
            )
    return None


def may_warn(field: Any, value: Any) -> bool:
    """Return whether a field of Django may warn when it prepares ``value`` for the database.

    It warns of a time without a time zone, if the site uses time zones. To make a plan, values are
    prepared more often than by Django alone, and each time would give a warning.
    """
    if value is None or not settings.USE_TZ:
        return False
    while (base := getattr(field, "base_field", None)) is not None:  # Of an ArrayField.
        field = base
    return isinstance(field, DateTimeField) and not (
        isinstance(value, datetime) and is_aware(value)
    )


def are_same(parameters: Sequence[Any], expected: Sequence[Any]) -> bool:
    # Objects of a driver, such as psycopg's Jsonb, cannot be compared, so compare only their types.
    return list(map(type, parameters)) == list(map(type, expected)) and all(
        one == other or type(one) not in PLAIN_TYPES
        for one, other in zip(parameters, expected, strict=True)
    )


def has_placeholder(field: Any, connection: Any) -> bool:
    """Return whether the placeholder in the SQL (usually ``%s``) can differ from value to value.

    Some fields choose it by the value, and not only by the value's type. A plan, which has one SQL
    for all values, cannot be made for such a field.
    """
    return any(
        hasattr(field, name) and not _is_binary_placeholder(getattr(field, name), name, connection)
        for name in ("get_placeholder", "get_placeholder_sql")
    )


def _is_binary_placeholder(method: Any, name: str, connection: Any) -> bool:
    """Return whether ``method`` is the one of Django's ``BinaryField``, on a backend of Django.

    The placeholder of such a field depends only on whether the value is None, an expression or
    another value. So a plan can be made for it.
    """
    own = vars(BinaryField).get(name)
    kind = next(c for c in type(connection.ops).__mro__ if "binary_placeholder_sql" in vars(c))
    return (
        own is not None
        and getattr(method, "__func__", None) is own
        and kind.__module__.startswith("django.db.backends.")
        and "binary_placeholder_sql" not in vars(connection.ops)
    )
