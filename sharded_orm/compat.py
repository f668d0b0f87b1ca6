"""The differences between the versions of Django that the package supports: 5.2, 6.0 and 6.1.

No other module compares a version. The rest of the package is written for the newest version. If an
older version lacks a feature, this module provides a replacement with the interface of the newest
version, or works without the feature.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any
from weakref import ref

import django
from django.contrib.postgres.functions import RandomUUID, TransactionNow
from django.db.models import deletion, functions

_RETURNS_UPDATED_ROWS = django.VERSION >= (6, 0)
HAS_FETCH_MODES = django.VERSION >= (6, 1)
_QUOTES_ALIASES = django.VERSION >= (6, 1)
_SETS_RAW_RELATIONS = django.VERSION >= (6, 1)
_HAS_GENERIC_DESCRIPTOR = django.VERSION >= (6, 1)
_HAS_DATABASE_ON_DELETE = django.VERSION >= (6, 1)
_HAS_UUID_FUNCTIONS = django.VERSION >= (6, 1)
_SQUASHES_SQUASHED = django.VERSION >= (6, 0)
_WRAPS_FILTERS = django.VERSION >= (6, 0)
_PLACEHOLDERS_HAVE_PARAMETERS = django.VERSION >= (6, 1)

# -- Placeholders --------------------------------------------------------------------


def binary_placeholder(connection: Any, value: bytes | None) -> str:
    """Return the SQL placeholder for ``value``, the value of a ``BinaryField``."""
    ops = connection.ops
    if _PLACEHOLDERS_HAVE_PARAMETERS:
        # Pass None as the compiler: only an expression needs a compiler, and ``value`` is a plain
        # value.
        return str(ops.binary_placeholder_sql(value, None)[0])
    return str(ops.binary_placeholder_sql(value))


# -- Fetch modes ---------------------------------------------------------------------
# A fetch mode (new in Django 6.1) says what happens when the code reads a value of an instance that
# was not loaded. The value is fetched for this instance only, or for all instances that were read
# together with it (its peers), or not at all.


def fetch(descriptor: Any, instance: Any) -> None:
    """Fetch the value of ``descriptor`` for ``instance``, as the fetch mode of ``instance`` says.

    :param descriptor: has the methods ``fetch_one(instance)`` and ``fetch_many(instances)``. In
        versions of Django without fetch modes, only ``fetch_one()`` is called.
    """
    if HAS_FETCH_MODES:
        instance._state.fetch_mode.fetch(descriptor, instance)
    else:
        descriptor.fetch_one(instance)


def copy_fetch_mode(queryset: Any, instance: Any) -> Any:
    """Set the fetch mode of ``queryset`` to that of ``instance``, and return ``queryset``.

    ``queryset`` itself is changed; no copy is made.
    """
    if HAS_FETCH_MODES:
        queryset._fetch_mode = instance._state.fetch_mode
    return queryset


def set_fetch_mode(instances: Iterable[Any], queryset: Any, *, is_set: bool) -> None:
    """Set the fetch mode of ``instances`` to that of ``queryset``, which has read them together.

    If the mode needs peers, as FETCH_PEERS does, make all instances from the same database peers of
    each other. Django then fetches a missing value for all peers, with one query.

    :param is_set: whether the instances have the mode already, because :func:`from_db` has made
        them.
    """
    if not HAS_FETCH_MODES:
        return
    mode = queryset._fetch_mode
    # Django reads the missing values of all peers from the database of the first peer. So instances
    # of different shards must not be peers.
    peers_on: dict[str | None, list[Any]] = defaultdict(list)
    for instance in instances:
        if not is_set:
            instance._state.fetch_mode = mode
        if mode.track_peers:
            instance._state.peers = peers = peers_on[instance._state.db]
            peers.append(ref(instance))


def from_db(model: Any, queryset: Any) -> Callable[[Any, Any, Any], Any]:
    """Return a function that makes an instance of ``model`` from a row that ``queryset`` has read.

    The function is ``model.from_db()``, with the fetch mode of ``queryset``. It takes an alias, the
    names of the fields, and their values.
    """
    if not HAS_FETCH_MODES:
        return model.from_db  # type: ignore[no-any-return]  # the model is of the type Any

    # Call a private function of Django instead of model.from_db(). This function gives a warning if
    # the model overrides from_db() without the argument for the fetch mode.
    from django.db.models import query

    return query._get_from_db(model, queryset._fetch_mode)  # type: ignore[attr-defined,no-any-return]  # the type stubs lack this function


def related_populators(klass_info: Any, select: Any, alias: str, queryset: Any) -> list[Any]:
    """Return the objects with which Django makes the related instances of ``select_related()``.

    :param klass_info: the attribute ``klass_info`` of a compiler that has compiled the query.
    :param select: the attribute ``select`` of this compiler.
    """
    from django.db.models import query

    arguments = (queryset._fetch_mode,) if HAS_FETCH_MODES else ()
    return query.get_related_populators(klass_info, select, alias, *arguments)


# -- Writing -------------------------------------------------------------------------


def update_result(exists: bool) -> Any:
    """Return what an override of ``Model._do_update()`` has to return if it sends no UPDATE.

    :param exists: whether the row exists. ``save()`` inserts the row if it does not.
    """
    if not _RETURNS_UPDATED_ROWS:
        return exists
    return [()] if exists else []


def returning_columns(ops: Any, fields: Any) -> tuple[str, Any]:
    """Return the clause of an INSERT that returns the values of ``fields``, and its parameters.

    :param ops: the ``ops`` of a connection.
    """
    if not _RETURNS_UPDATED_ROWS:
        return ops.return_insert_columns(fields)  # type: ignore[no-any-return]  # ops is of the type Any
    return ops.returning_columns(fields)  # type: ignore[no-any-return]  # ops is of the type Any


def changes_rows_unseen(on_delete: Any) -> bool:
    """Whether the database itself, and not Django, deletes or changes rows because of ``on_delete``."""
    return _HAS_DATABASE_ON_DELETE and isinstance(on_delete, deletion.DatabaseOnDelete)


def set_base(
    manager: Any, objs: Iterable[Any], *, clear: bool, through_defaults: Any, raw: bool
) -> None:
    """Call ``manager.set_base()``, which sets the related rows of a many-to-many field.

    :param raw: whether the rows come from a fixture.
    """
    if _SETS_RAW_RELATIONS:
        manager.set_base(objs, clear=clear, through_defaults=through_defaults, raw=raw)
    else:
        manager.set(objs, clear=clear, through_defaults=through_defaults)


# -- Migrations ----------------------------------------------------------------------


def migration_records(loader: Any, migration: Any, *, backwards: bool) -> list[tuple[str, str]]:
    """Return the rows of ``django_migrations`` that Django adds when it has applied ``migration``.

    If ``backwards`` is true, return the rows that Django deletes when it has unapplied
    ``migration``. A squashed migration has a row for each migration that it replaces. Since Django
    6.0, these may be squashed migrations themselves.
    """
    # These rules are those of MigrationExecutor.record_migration(), which adds the rows, and of
    # MigrationExecutor.unapply_migration(), which deletes them.
    key = (migration.app_label, migration.name)
    replaced = [(label, name) for label, name in migration.replaces]
    if not _SQUASHES_SQUASHED:
        return [*replaced, key] if backwards or not replaced else replaced
    records: list[tuple[str, str]] = []
    for inner_key in replaced:
        inner = loader.disk_migrations.get(inner_key)
        records += migration_records(loader, inner, backwards=backwards) if inner else [inner_key]
    return [*records, key]


def all_replaced_applied(loader: Any, key: Any, applied: Any) -> bool:
    """Whether all migrations that the squashed migration ``key`` replaces are in ``applied``."""
    if _SQUASHES_SQUASHED:
        return bool(loader.all_replaced_applied(key, applied))
    return all(replaced in applied for replaced in loader.replacements[key].replaces)


# -- Admin ---------------------------------------------------------------------------
#
# Since Django 6.1, an action of the admin is a dataclass. In older versions it is a tuple, and a
# project may still return tuples.


def action_parts(action: Any) -> tuple[Any, str, Any]:
    """Return the parts of an action of the admin: its function, its name, and its description."""
    if isinstance(action, tuple):
        return action
    return action.func, action.name, action.plural_description


def with_action(action: Any, func: Any) -> Any:
    """Return a copy of ``action`` that calls ``func``."""
    return (func, *action[1:]) if isinstance(action, tuple) else replace(action, func=func)


# -- Expressions ---------------------------------------------------------------------


def _random_functions() -> tuple[type[Any], ...]:
    if not _HAS_UUID_FUNCTIONS:
        return (functions.Random, RandomUUID)
    return (functions.Random, RandomUUID, functions.UUID4, functions.UUID7)


RANDOM_FUNCTIONS = _random_functions()
"""Functions whose value differs from row to row and from query to query, by chance."""

TIME_FUNCTIONS = (functions.Now, TransactionNow)
"""Functions whose value differs from query to query, because time passes."""


def arguments_of(aggregate: Any) -> tuple[list[Any], Any]:
    """Return the expressions from which ``aggregate`` is computed, and the condition of its ``filter``.

    The condition is None if ``aggregate`` has no filter.
    """
    condition = aggregate.filter
    if _WRAPS_FILTERS and condition is not None:
        condition = condition.condition
    return list(aggregate.source_expressions), condition


# -- Compilers and descriptors -------------------------------------------------------


def quote_name(compiler: Any, name: str) -> str:
    """Return ``name``, the name or alias of a table, quoted as ``compiler`` quotes it."""
    quote = compiler.quote_name if _QUOTES_ALIASES else compiler.quote_name_unless_alias
    return str(quote(name))


class _FieldAsDescriptor:
    """A replacement for ``GenericForeignKeyDescriptor`` in versions of Django without this class.

    In these versions, the generic foreign key itself is the descriptor. The replacement calls it.
    """

    def __init__(self, field: Any) -> None:
        self.field = field

    def is_cached(self, instance: Any) -> bool:
        return bool(self.field.is_cached(instance))

    def get_prefetch_querysets(self, instances: Any, querysets: Any = None) -> Any:
        return self.field.get_prefetch_querysets(instances, querysets)

    def __get__(self, instance: Any, cls: Any = None) -> Any:
        return self if instance is None else self.field.__get__(instance, cls)

    def __set__(self, instance: Any, value: Any) -> None:
        self.field.__set__(instance, value)


def generic_foreign_key_descriptor() -> type[Any]:
    """Return the class of the descriptor of generic foreign keys.

    Call this only if ``django.contrib.contenttypes`` is installed.
    """
    if not _HAS_GENERIC_DESCRIPTOR:
        return _FieldAsDescriptor
    from django.contrib.contenttypes import fields

    return fields.GenericForeignKeyDescriptor
