"""Checks of rows under a bound key. New rows get it, and rows with a different key are refused.

The bound key is the shard key that a ``with bound()`` block sets for all rows used in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from django.db.models import Model

from sharded_orm.exceptions import BoundKeyMismatch
from sharded_orm.models.sharding.bound_key import BoundKey, key_in_force
from sharded_orm.models.sharding.key_errors import describe
from sharded_orm.models.sharding.options import required_options


def give_bound_key(instance: Any) -> None:
    """Give the new row ``instance`` the shard key that ``bound()`` has set, if it has no key yet.

    :raises BoundKeyMismatch: the row has a different key.
    """
    bound_key = key_in_force(type(instance))
    if bound_key is None:
        return
    key: Any = required_options(instance.__class__).key
    if key is not None:
        # The key may be a foreign key to an instance that is assigned but not saved yet. Then leave
        # it empty, because Django copies the id of that instance into it later.
        is_related = key.is_relation and key.get_cached_value(instance, default=None) is not None
        is_new = instance._state.adding
        if is_new and instance.__dict__.get(key.attname) is None and not is_related:
            setattr(instance, key.attname, bound_key.value)
    refuse_other_key(instance)


def refuse_other_key(instance: Any) -> None:
    """Raise :exc:`BoundKeyMismatch` if the shard key of ``instance`` is not the bound key.

    The bound key is the one that a ``with bound()`` block has set. Does nothing if no key of the
    instance's model is bound, or if the instance has no key. If the key of the instance is
    deferred, one query loads it. A row of an automatic many-to-many table is refused if one of the
    two related rows is in memory and has another key.
    """
    bound_key = key_in_force(instance.__class__)
    if bound_key is None:
        return
    if required_options(instance.__class__).key is None:
        for related in instance._state.fields_cache.values():
            if isinstance(related, Model):
                refuse_other_key(related)
    elif _differs(instance, bound_key):
        value = getattr(instance, bound_key.name)
        raise BoundKeyMismatch(
            f"{describe(instance)} has the shard key {bound_key.name}={value!r}, and {bound_key} is"
            " in force. Work on it inside sharded_orm.unbound(), or under its own key."
        )


def refuse_rows_given_by_id(instance: Any, written: Iterable[str] | None = None) -> None:
    """Raise :exc:`BoundKeyMismatch` if a many-to-many row refers to a row only by the row's id.

    Inside ``bound()``, both related rows must have the bound key. For example,
    ``Through(photo_id=1, tag=tag).save()`` is refused, because the id does not tell the photo's
    key.

    Does nothing inside :func:`related_rows_checked`, for other models than automatic many-to-many
    tables, or if no key is bound for the rows.

    :param written: names of the fields that are about to be written; None for all fields.
    """
    names = None if written is None else set(written)
    values = {
        relation.name: relation.get_cached_value(
            instance, default=getattr(instance, relation.attname)
        )
        for relation in _checked_relations(instance.__class__)
        if names is None or not names.isdisjoint((relation.name, relation.attname))
    }
    refuse_values_given_by_id(instance.__class__, values, describe(instance))


def refuse_values_given_by_id(
    model: type[Model], values: Mapping[str, Any], row: str | None = None
) -> None:
    """Raise :exc:`BoundKeyMismatch` unless all related rows in ``values`` have the bound key.

    Inside ``bound()``, both rows that a many-to-many row relates must have the bound key. So
    ``values`` must contain instances with this key, and not ids, because an id does not tell the
    key.

    Does nothing inside :func:`related_rows_checked`, for other models than automatic many-to-many
    tables, or if no key is bound for the rows.

    :param values: maps field names to values, as for ``update()``.
    :param row: a description of the row for the error message; None for several rows.
    """
    for relation in _checked_relations(model):
        for name in {relation.name, relation.attname}.intersection(values):
            value = values[name]
            if isinstance(value, Model):
                refuse_other_key(value)
                continue
            raise BoundKeyMismatch(
                f"{row or f'Rows of {model.__name__}'} would relate {relation.attname}={value!r}, and"
                f" the id does not tell the key of that row. ({key_in_force(model)} is in force.) Give"
                f" the row as an instance, {relation.name}=…, or use add() of the relation."
            )


def _checked_relations(model: type[Model]) -> list[Any]:
    """Return the foreign keys of ``model`` whose related rows must have the bound key.

    These are the foreign keys of an automatic many-to-many table, if ``bound()`` has set a shard
    key for its rows. Otherwise the list is empty.
    """
    if key_in_force(model) is None or _are_related_rows_checked.get():
        return []
    options = required_options(model)
    return options.relations if options.key is None else []


_are_related_rows_checked: ContextVar[bool] = ContextVar(
    "sharded_orm_related_rows_checked", default=False
)


@contextmanager
def related_rows_checked() -> Iterator[None]:
    """Context manager for a caller that has already compared the shard keys of the rows to relate.

    In the ``with`` block, new rows of automatic many-to-many tables are not checked. The check
    would refuse related rows that do not have the bound key. It would also refuse ids and
    expressions instead of related rows, because they do not tell the key.
    """
    token = _are_related_rows_checked.set(True)
    try:
        yield
    finally:
        _are_related_rows_checked.reset(token)


def has_other_key(instance: Any) -> bool:
    """Return whether the shard key of ``instance`` differs from the bound key.

    The bound key is the shard key that a ``with bound()`` block has set. False if no key is bound,
    or if the instance has no key yet. The model of the instance must have a shard key.

    :raises TypeError, ValueError, ValidationError: the row's value cannot be a key.
    """
    bound_key = key_in_force(type(instance))
    return bound_key is not None and _differs(instance, bound_key)


def _differs(instance: Any, bound_key: BoundKey) -> bool:
    is_new = instance._state.adding
    value = instance.__dict__.get(bound_key.name) if is_new else getattr(instance, bound_key.name)
    if value is None:
        return False
    key: Any = required_options(instance.__class__).key
    return bool(key.get_prep_value(value) != bound_key.value)
