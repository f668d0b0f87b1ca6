"""Converts the values of many rows before the first shard stores its rows, to find wrong values.

Django converts the values of a row when it sends the row, and finds a wrong value only then, such
as text for an ``IntegerField``. If the wrong value is in a row for the third shard, the rows of the
first two shards are stored already. So this module converts all values before anything is sent. The
converted values are thrown away, because Django converts the values again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from django.core.exceptions import FieldError
from django.db import connections, transaction
from django.db.models import (
    DateField,
    DateTimeField,
    DecimalField,
    DurationField,
    Field,
    TimeField,
    UUIDField,
)
from django.db.models.expressions import DatabaseDefault
from django.db.models.sql import InsertQuery, UpdateQuery

from sharded_orm.models.fields.tickets import TicketField
from sharded_orm.models.plans.prepared_values import is_sent_unchanged
from sharded_orm.models.sharding.statements import may_be_expression

# These pre_save() methods return the attribute of the instance, or a new id if it is None.
_PLAIN_PRE_SAVE = frozenset({Field.pre_save, TicketField.pre_save})
# These pre_save() methods return the attribute of the instance unless the field has auto_now or
# auto_now_add.
_PRE_SAVE_OF_TIMES = frozenset({DateField.pre_save, DateTimeField.pre_save, TimeField.pre_save})
# These fields send None as NULL, on every database.
_SENDS_NONE = frozenset(
    {DateField, DateTimeField, DecimalField, DurationField, TimeField, UUIDField}
)


def check_new_values(model: Any, rows_by_alias: Mapping[str, Sequence[Any]]) -> None:
    """Raise the error that Django would raise when it inserts the rows. Sends nothing.

    If all rows are for one shard, nothing is checked, because Django converts all their values
    before it sends them.

    Values that ``pre_save()`` computes are not checked, because ``pre_save()`` must be called only
    once for each row.

    Cost: each value is converted once more than in Django, except values that Django sends
    unchanged, such as an ``int`` for an ``IntegerField``.

    :param rows_by_alias: maps the alias of each shard to the new rows of ``model`` for this shard.
    """
    if len(rows_by_alias) < 2:
        return
    fields = [
        field
        for field in model._meta.concrete_fields
        if not field.generated and _stores_attribute(field)
    ]
    for alias, rows in rows_by_alias.items():
        connection = connections[alias]
        for field, has_expressions in _converted_fields(fields, rows, connection):
            if not has_expressions:
                for value in _values(field, rows):
                    field.get_db_prep_save(value, connection=connection)
                continue
            compiler = InsertQuery(model).get_compiler(alias)
            for value in _values(field, rows):
                if type(value) is not DatabaseDefault:
                    compiler.prepare_value(field, value)


def check_changed_values(rows_by_alias: Mapping[str, Sequence[Any]], fields: Iterable[Any]) -> None:
    """Raise the error that Django's ``bulk_update()`` would raise for the rows. Sends nothing.

    If all rows are on one shard, nothing is checked, because Django converts all their values
    before it sends them.

    Cost: each value is converted once more than in Django, except values that Django sends
    unchanged, such as an ``int`` for an ``IntegerField``.

    :param rows_by_alias: maps the alias of each shard to the rows that are stored there.
    :param fields: the fields to be updated.
    """
    if len(rows_by_alias) < 2:
        return
    # Skip fields that bulk_update() does not accept. Django refuses them itself, before it updates
    # a row.
    fields = [field for field in fields if field.concrete and not field.primary_key]
    for alias, rows in rows_by_alias.items():
        connection = connections[alias]
        # Django's bulk_update() converts values inside its own atomic block. So a wrong value marks
        # an atomic block of the caller for rollback. Do the same here. (check_new_values() does not
        # do so: since Django 6.0, a wrong value in bulk_create() marks no block.)
        with transaction.mark_for_rollback_on_error(using=alias):
            for field, has_expressions in _converted_fields(fields, rows, connection):
                for value in _values(field, rows):
                    if has_expressions and hasattr(value, "resolve_expression"):
                        _check_expression(field, value)
                    else:
                        field.get_db_prep_save(value, connection=connection)


def _check_expression(field: Any, value: Any) -> None:
    # Raise the errors that SQLUpdateCompiler.as_sql() raises for an expression.
    resolved = value.resolve_expression(UpdateQuery(field.model), allow_joins=False, for_save=True)
    for is_contained, kind in (
        (resolved.contains_aggregate, "Aggregate functions"),
        (resolved.contains_over_clause, "Window expressions"),
    ):
        if is_contained:
            raise FieldError(f"{kind} are not allowed in this query ({field.name}={resolved!r}).")


def _stores_attribute(field: Any) -> bool:
    """Return whether the field stores the attribute of the instance as it is.

    False if ``pre_save()`` may compute another value, such as the current time for ``auto_now``.
    """
    if "pre_save" in field.__dict__:
        return False
    pre_save = type(field).pre_save
    return pre_save in _PLAIN_PRE_SAVE or (
        pre_save in _PRE_SAVE_OF_TIMES and not field.auto_now and not field.auto_now_add
    )


def _kinds(rows: Iterable[Any]) -> dict[str, set[type]]:
    """Map the name of each attribute of ``rows`` to the types of its values.

    For example, ``{"id": {int}, "title": {str, NoneType}}``.
    """
    # There are many rows, but few combinations of names and types. So collect the distinct
    # combinations first. Read __dict__ and not the attributes, because reading a deferred attribute
    # would send a query.
    shapes = {
        (tuple(values), tuple(map(type, values.values())))
        for values in (row.__dict__ for row in rows)
    }
    kinds: dict[str, set[type]] = {}
    for names, types in shapes:
        for name, kind in zip(names, types, strict=True):
            kinds.setdefault(name, set()).add(kind)
    return kinds


def _converted_fields(
    fields: Iterable[Any], rows: Iterable[Any], connection: Any
) -> Iterator[tuple[Any, bool]]:
    """Yield pairs (field, has_expressions) for the fields whose values must be checked.

    Fields whose values are all sent unchanged are left out, because no conversion can fail.
    ``has_expressions`` is True if some of the values may be expressions.
    """
    kinds_by_name = _kinds(rows)
    for field in fields:
        kinds = kinds_by_name.get(field.attname, set())
        if type(field) in _SENDS_NONE:
            kinds = kinds - {type(None)}
        if not all(is_sent_unchanged(field, kind, connection) for kind in kinds):
            yield field, any(map(may_be_expression, kinds))


def _values(field: Any, rows: Iterable[Any]) -> Iterator[Any]:
    name = field.attname
    return (getattr(row, name) for row in rows if name in row.__dict__)
