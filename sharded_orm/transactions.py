""":func:`atomic`: a transaction on the shard of a row or of a shard key."""

from __future__ import annotations

from typing import Any

from django.db import transaction
from django.db.models import Model

from sharded_orm.exceptions import ShardKeyRequired
from sharded_orm.models.sharding.current_shard import current_alias
from sharded_orm.models.sharding.options import ShardOptions, shard_key_required, shard_options
from sharded_orm.topology.model import Shard


def atomic(
    model: type[Model] | Model,
    *,
    savepoint: bool = True,
    durable: bool = False,
    **key: Any,
) -> transaction.Atomic:
    """Return ``transaction.atomic()`` for the shard of a row or of a shard key.

    ::

        with sharded_orm.atomic(Photo, user_id=1):
            ...

    :param model: an instance of a sharded model, or the model class. With the class, pass one more
        keyword argument: the name and the value of the shard key.
    :param savepoint: passed to ``transaction.atomic()``.
    :param durable: passed to ``transaction.atomic()``.
    :raises ShardKeyRequired: the model has no shard key, or the keyword is not the shard key.
    :raises DanglingShardKey: the key is new, and the row to which it refers does not exist.

    If the key has no shard yet, a shard is chosen and recorded, because the block is about to write
    the key's rows. The transaction covers a single shard. Two such blocks for two shards commit one
    after the other, not atomically (P14).
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
        alias = str(current_alias(options, model))
    else:
        alias = options.place(model).alias
    return transaction.atomic(using=alias, savepoint=savepoint, durable=durable)


def _place(options: ShardOptions, value: Any) -> Shard:
    key = options.key
    assert key is not None
    if type(value) is int or type(value) is str:
        return options.place_key(options.group, key.get_prep_value(value))
    # If the shard key is a foreign key, the value may be an instance. It may also be None, which
    # place() refuses.
    name = key.name if isinstance(value, Model) else key.attname
    return options.place(options.model(**{name: value}))
