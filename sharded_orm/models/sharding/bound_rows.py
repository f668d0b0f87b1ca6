"""Rows under a bound key: new rows get the key, and rows of another key are refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from django.db.models import Model

from sharded_orm.exceptions import BoundKeyMismatch
from sharded_orm.models.sharding.bound_key import BoundKey, key_in_force
from sharded_orm.models.sharding.options import ShardOptions, describe, options_of


def give_bound_key(instance: Any) -> None:
    """Set the shard key of the new row ``instance`` to the bound key if the row has none yet.

    :raises BoundKeyMismatch: the row has another key.
    """
    bound_key = key_in_force(type(instance))
    if bound_key is None:
        return
    key: Any = _options(instance).key
    if key is not None:
        # An instance of the key may have been assigned before it was saved. Django copies its id
        # later.
        is_related = key.is_relation and key.get_cached_value(instance, default=None) is not None
        is_new = instance._state.adding
        if is_new and instance.__dict__.get(key.attname) is None and not is_related:
            setattr(instance, key.attname, bound_key.value)
    refuse_other_key(instance)


def refuse_other_key(instance: Any) -> None:
    """Raise :exc:`BoundKeyMismatch` if a binding is in force for another key than that of
    ``instance``.

    Does nothing for instances of models without a bound key, and for a row without a key. If the
    key was not loaded, one query loads it. A row of an automatic many-to-many table is refused if a
    row that it relates, and that is in memory, has another key.
    """
    bound_key = key_in_force(instance.__class__)
    if bound_key is None:
        return
    if _options(instance).key is None:
        for related in instance._state.fields_cache.values():
            if isinstance(related, Model):
                refuse_other_key(related)
    elif _differs(instance, bound_key):
        value = getattr(instance, bound_key.name)
        raise BoundKeyMismatch(
            f"{describe(instance)} has the shard key {bound_key.name}={value!r}, and {bound_key} is"
            " in force. Work on it inside sharded_orm.unbound(), or under its own key."
        )


def refuse_rows_given_by_id(instance: Any) -> None:
    """Raise :exc:`BoundKeyMismatch` if ``instance`` is a new row of an automatic many-to-many table,
    and a row that it relates is given by its id only, which does not tell the key.

    Does nothing inside :func:`related_rows_checked`, or if no binding is in force for the rows.
    """
    bound_key = key_in_force(instance.__class__)
    if bound_key is None or _options(instance).key is not None or not instance._state.adding:
        return
    if _are_related_rows_checked.get():
        return
    for field in instance._meta.concrete_fields:
        if field.is_relation and field.get_cached_value(instance, default=None) is None:
            raise BoundKeyMismatch(
                f"{describe(instance)} is to relate {field.attname}="
                f"{getattr(instance, field.attname)!r}, and the id does not tell the key of that row."
                f" ({bound_key} is in force.) Give the row as an instance, {field.name}=…, or use add()"
                " of the relation."
            )


_are_related_rows_checked: ContextVar[bool] = ContextVar(
    "sharded_orm_related_rows_checked", default=False
)


@contextmanager
def related_rows_checked() -> Iterator[None]:
    """The related manager that inserts rows of an automatic table in the block has compared the keys
    of the rows that they relate.
    """
    token = _are_related_rows_checked.set(True)
    try:
        yield
    finally:
        _are_related_rows_checked.reset(token)


def has_other_key(instance: Any) -> bool:
    """Whether :func:`refuse_other_key` raises an error for ``instance``, which has a shard key.

    :raises TypeError, ValueError, ValidationError: the row's value cannot be a key.
    """
    bound_key = key_in_force(type(instance))
    return bound_key is not None and _differs(instance, bound_key)


def _differs(instance: Any, bound_key: BoundKey) -> bool:
    is_new = instance._state.adding
    value = instance.__dict__.get(bound_key.name) if is_new else getattr(instance, bound_key.name)
    if value is None:
        return False
    key: Any = _options(instance).key
    return bool(key.get_prep_value(value) != bound_key.value)


def _options(instance: Any) -> ShardOptions:
    options = options_of(instance)
    assert options is not None
    return options
