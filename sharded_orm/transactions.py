"""Transactions on the shard of a key."""

from __future__ import annotations

from typing import Any

from django.db import transaction
from django.db.models import Model

from sharded_orm import runtime
from sharded_orm.exceptions import ShardKeyRequired
from sharded_orm.models.sharding.options import ShardOptions, shard_key_required, shard_options
from sharded_orm.topology.model import Shard


def atomic(
    model: type[Model] | Model,
    *,
    savepoint: bool = True,
    durable: bool = False,
    **key: Any,
) -> transaction.Atomic:
    """``transaction.atomic()`` on the shard of a row, or of a key.

    ::

        with sharded_orm.atomic(Photo, user_id=1):
            ...

    :param model: a sharded model, with its shard key as the only keyword; or an instance.
    :param savepoint: as of ``transaction.atomic()``.
    :param durable: as of ``transaction.atomic()``.
    :raises ShardKeyRequired: the keyword is not the model's shard key.

    A key without a shard is placed, because it is about to be written. The transaction covers
    one shard; blocks on two shards commit one after the other (P14).
    """
    cls = model if isinstance(model, type) else type(model)
    options = shard_options(cls)
    if options is None or options.key is None:
        raise ShardKeyRequired(
            f"{cls.__name__} is not a sharded model; use django.db.transaction.atomic()."
        )
    if isinstance(model, type):
        names = {options.key.name, options.key.attname}
        if len(key) != 1 or not names.issuperset(key):
            raise shard_key_required(options, f"atomic() was given {sorted(key)!r}")
        alias = _place(options, *key.values()).alias
    elif not model._state.adding and model._state.db:
        alias = str(model._state.db)
    else:
        alias = options.place(model).alias
    return transaction.atomic(using=alias, savepoint=savepoint, durable=durable)


def _place(options: ShardOptions, value: Any) -> Shard:
    key = options.key
    assert key is not None
    if type(value) is int or type(value) is str:
        return runtime.place(options.group, key.get_prep_value(value))
    # An instance that the key refers to; or None, which is refused.
    name = key.name if isinstance(value, Model) else key.attname
    return options.place(options.model(**{name: value}))
