"""Converts the values of many rows before the first shard stores its rows, to find wrong values.

Django converts values when it sends them. The rows of the first shards would be stored before a
wrong value for a later shard is found, such as text for an ``IntegerField``. The result of the
conversion is not kept.
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
# These do the same, unless the field has auto_now or auto_now_add.
_PRE_SAVE_OF_TIMES = frozenset({DateField.pre_save, DateTimeField.pre_save, TimeField.pre_save})
# These fields send None as NULL, on every database.
_SENDS_NONE = frozenset(
    {DateField, DateTimeField, DecimalField, DurationField, TimeField, UUIDField}
)


def check_new_values(model: Any, rows_by_alias: Mapping[str, Sequence[Any]]) -> None:
    """Raise the error that Django would raise when it inserts the rows. Sends nothing.

    Does nothing for rows of one shard, because Django converts their values before it sends them.

    Cost: that of Django's conversion, for values that are not sent unchanged. Values that
    ``pre_save()`` computes are not checked, because it may be called only once.

    :param rows_by_alias: new rows of ``model``, keyed by the alias of their shard.
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

    Does nothing for rows of one shard, because Django converts their values before it sends them.

    Cost: that of Django's conversion, but only for values that are not sent unchanged.

    :param rows_by_alias: stored rows, keyed by the alias of their shard.
    :param fields: the fields to be updated.
    """
    if len(rows_by_alias) < 2:
        return
    # Skip fields that bulk_update() refuses: Django raises its error before it updates a row.
    fields = [field for field in fields if field.concrete and not field.primary_key]
    for alias, rows in rows_by_alias.items():
        connection = connections[alias]
        # Django's bulk_update() converts values inside of an atomic block. So an error marks a block
        # around the call for rollback. An error of bulk_create() does not, since Django 6.0.
        with transaction.mark_for_rollback_on_error(using=alias):
            for field, has_expressions in _converted_fields(fields, rows, connection):
                for value in _values(field, rows):
                    if has_expressions and hasattr(value, "resolve_expression"):
                        _check_expression(field, value)
                    else:
                        field.get_db_prep_save(value, connection=connection)


def _check_expression(field: Any, value: Any) -> None:
    # Check the expression as SQLUpdateCompiler.as_sql() does.
    resolved = value.resolve_expression(UpdateQuery(field.model), allow_joins=False, for_save=True)
    for is_contained, kind in (
        (resolved.contains_aggregate, "Aggregate functions"),
        (resolved.contains_over_clause, "Window expressions"),
    ):
        if is_contained:
            raise FieldError(f"{kind} are not allowed in this query ({field.name}={resolved!r}).")


def _stores_attribute(field: Any) -> bool:
    """Whether the field stores the attribute of the instance, and nothing that it computes."""
    if "pre_save" in field.__dict__:
        return False
    pre_save = type(field).pre_save
    return pre_save in _PLAIN_PRE_SAVE or (
        pre_save in _PRE_SAVE_OF_TIMES and not field.auto_now and not field.auto_now_add
    )


def _kinds(rows: Iterable[Any]) -> dict[str, set[type]]:
    """Return the types of the attributes of ``rows``, keyed by the names of the attributes."""
    # There are many rows, but few combinations of names and types. Deferred fields have no entry,
    # because reading them would send a query.
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
    """Yield those of ``fields`` whose values Django may convert, or may not be able to.

    With each field, yield whether some of the values are expressions.
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
