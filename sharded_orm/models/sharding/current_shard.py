"""The shard on which a stored row is now, although its key may have moved since the row was read.

``_state.db`` of an instance names the shard from which the row was read. That may be long ago,
because the instance may have been pickled or cached. The shard can differ only if the key has
moved, so an instance of any other key costs no additional query.
"""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ValidationError
from django.db.models import QuerySet

from sharded_orm import runtime
from sharded_orm.exceptions import KeyMoved


def current_alias(options: Any, instance: Any) -> str | None:
    """Return the alias of the shard that has a stored row now.

    The result is ``_state.db`` if the key has not moved, or if ``_state.db`` is not a shard, such
    as the database that had the rows before they were sharded. Costs as much as a look-up of the
    key, but nothing inside Django's ``TestCase``, where no key moves. If some keys have moved and
    the instance does not know its key, one query reads the key from ``_state.db`` first.

    :raises KeyMoved: the instance does not know its key, and its row is not on ``_state.db`` any
        more.
    :param options: the :class:`~sharded_orm.models.sharding.options.ShardOptions` of the instance.
    """
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
        return alias  # The value cannot be a key. Code that needs the key reports that.
    if number is None:
        return alias
    shard = runtime.topology().resolve(alias)
    if shard is None or shard.group != options.group:
        return alias
    return runtime.shard(options.group, number).alias


def _key_field(options: Any) -> Any:
    """Return the field of the shard key.

    For an automatic many-to-many table, return the field of the first of the two models that it
    joins.
    """
    if options.key is not None:
        return options.key
    return options.relations[0].related_model._shard_options().key


def _read_key(options: Any, instance: Any, alias: str) -> Any:
    """Read the shard key of ``instance``, which was loaded without its key, from the shard ``alias``.

    Return None if ``alias`` is no shard of the group, or if the instance has no primary key.

    :raises KeyMoved: the shard does not have the row.
    """
    shard = runtime.topology().resolve(alias)
    attname = _key_field(options).attname
    if shard is None or shard.group != options.group or instance.pk is None:
        return None
    if options.key is not None and attname in instance.__dict__:
        return None  # None was assigned. Code that needs the key reports that.
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
    """Whether a stored row has another shard key than ``instance``.

    Called if an UPDATE found no row.

    At most two queries.

    :param rows: a queryset on the shard of the UPDATE, not limited to one key.
    :param pk: the primary key of the row.
    """
    if rows.filter(pk=pk).exists():
        return True
    read_from = instance._state.db
    if read_from in (None, rows.db):
        return False
    # The row was read from another shard than the one that the instance's key has now. Either the
    # key has moved, or another key was assigned to the instance.
    former = rows.using(read_from).filter(pk=pk)
    return bool(former.exclude(**{options.key.attname: options.key_of(instance)}).exists())
