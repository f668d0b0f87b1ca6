"""Finds the current shard of a stored row, whose key may have moved since the row was read.

``_state.db`` is the shard from which the instance was read. That may be long ago, for example if
the instance was pickled or cached. The present shard of the key is looked up, and the process
usually remembers it. One more query is sent only if keys have moved and the instance was loaded
without its key.
"""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ValidationError
from django.db.models import QuerySet
from django.utils.functional import LazyObject

from sharded_orm import runtime
from sharded_orm.exceptions import KeyMoved


def unwrapped(instance: Any) -> Any:
    """Return the instance itself if ``instance`` is a lazy object, such as ``request.user``.

    The ``__dict__`` and the ``type()`` of a lazy object are not those of the instance.
    """
    while issubclass(type(instance), LazyObject):
        _ = instance.__class__  # evaluates the lazy object
        instance = instance._wrapped
    return instance


def current_alias(options: Any, instance: Any) -> str | None:
    """Return the alias of the shard that has a stored row now.

    The result is ``_state.db`` if the key has not moved. It is also ``_state.db`` if this is not a
    shard, such as the database that had the rows before they were sharded.

    Cost: one look-up of the key's shard, but nothing inside Django's ``TestCase``, where no key
    moves. If some keys have moved and the instance was loaded without its key, one query reads the
    key from ``_state.db`` first.

    :raises KeyMoved: the key of the instance is not loaded, and its row is not on ``_state.db`` any
        more.
    :param options: the :class:`~sharded_orm.models.sharding.options.ShardOptions` of the instance.
    """
    instance = unwrapped(instance)
    alias: str | None = instance._state.db
    strategy = runtime.strategy(options.group)
    if alias is None or not strategy.moves_keys:
        return alias
    field = _key_field(options)
    value = None if options.key is None else instance.__dict__.get(field.attname)
    if value is None and not instance._state.adding and strategy.has_moved_keys():
        value = _read_key(options, instance, alias)
    if value is None or hasattr(value, "resolve_expression"):
        return alias
    try:
        number = strategy.moved_to(field.get_prep_value(value))
    except (TypeError, ValueError, ValidationError):
        # The instance's value cannot be a shard key. Raise no error here. The code that uses the
        # key raises one later.
        return alias
    if number is None:
        return alias
    shard = runtime.topology().resolve(alias)
    if shard is None or shard.group != options.group:
        return alias
    return runtime.shard(options.group, number).alias


def _key_field(options: Any) -> Any:
    """Return the field of the shard key.

    An automatic many-to-many table has no field for the shard key. For it, return the key of the
    first of the two related models.
    """
    if options.key is not None:
        return options.key
    return options.relations[0].related_model._shard_options().key


def _read_key(options: Any, instance: Any, alias: str) -> Any:
    """Read the shard key of ``instance`` from the shard ``alias``.

    It is called if the instance was loaded without its key. Return None if ``alias`` is not a shard
    of the group, or if the instance has no primary key.

    :raises KeyMoved: the shard does not have the row.
    """
    shard = runtime.topology().resolve(alias)
    attname = _key_field(options).attname
    if shard is None or shard.group != options.group or instance.pk is None:
        return None
    if options.key is not None and attname in instance.__dict__:
        # The key is not deferred, but the program has set it to None. So do not load it. Code that
        # needs the key raises an error later.
        return None
    path = attname if options.key is not None else f"{options.relations[0].name}__{attname}"
    # Use Django's queryset, because the library's own would look for the shard again.
    rows: Any = QuerySet(type(instance), using=alias)
    key = rows.filter(pk=instance.pk).values_list(path, flat=True).first()
    if key is None:
        raise KeyMoved(
            f"{type(instance).__name__} with pk={instance.pk!r} is no longer on {alias!r}, from which it"
            " was read without its shard key. Either its key has moved to another shard, or the row was"
            " deleted. Load the row again, with a condition on the shard key."
        )
    if options.key is not None:
        instance.__dict__[attname] = key
    return key


def is_of_other_key(options: Any, instance: Any, rows: Any, pk: Any) -> bool:
    """Return whether the shard key of the stored row differs from that of ``instance``.

    Call this function after an UPDATE of the row has found no row. It sends at most two queries.

    :param rows: a queryset on the shard of the UPDATE, for rows of all keys.
    :param pk: the primary key of the row.
    """
    if rows.filter(pk=pk).exists():
        return True
    read_from = instance._state.db
    if read_from in (None, rows.db):
        return False
    # The instance was not read from the shard of its present key. Either the row has moved with its
    # key, or the program has assigned a new key to the instance. In the second case, the shard from
    # which the instance was read still has the row, with its old key.
    former = rows.using(read_from).filter(pk=pk)
    return bool(former.exclude(**{options.key.attname: options.key_of(instance)}).exists())
