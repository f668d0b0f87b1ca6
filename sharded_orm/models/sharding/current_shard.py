"""The shard on which a stored row is now, although its key may have moved since the row was read.

``_state.db`` of an instance names the shard from which the row was read. That may be long ago: the
instance may have been pickled or cached. Only for keys that have moved is anything else to be found,
so an instance of any other key costs no query that it did not cost before.
"""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ValidationError

from sharded_orm import runtime


def current_alias(options: Any, instance: Any) -> str | None:
    """Return the alias of the shard that has a stored row now; ``_state.db`` if the key has not moved.

    The result is also ``_state.db`` if the instance does not tell its key, or if that alias is no
    shard, such as the database that had the rows before they were sharded. Costs what a look-up of
    the key costs, but nothing inside Django's ``TestCase``, where no key moves.

    :param options: the :class:`~sharded_orm.models.sharding.options.ShardOptions` of the instance.
    """
    alias: str | None = instance._state.db
    strategy = runtime.strategy(options.group)
    if alias is None or not strategy.moves_keys or options.key is None:
        return alias
    value = instance.__dict__.get(options.key.attname)
    if value is None or hasattr(value, "resolve_expression"):
        return alias
    try:
        number = strategy.moved_to(options.key.get_prep_value(value))
    except (TypeError, ValueError, ValidationError):
        return alias  # The value cannot be a key. Whoever needs the key reports that.
    if number is None:
        return alias
    shard = runtime.topology().resolve(alias)
    if shard is None or shard.group != options.group:
        return alias
    return runtime.shard(options.group, number).alias


def is_of_other_key(options: Any, instance: Any, rows: Any, pk: Any) -> bool:
    """Whether a stored row, which an UPDATE with the shard key of ``instance`` has not found, is
    stored with another shard key.

    At most two queries.

    :param rows: a queryset on the shard of the UPDATE.
    :param pk: the primary key of the row.
    """
    if rows.filter(pk=pk).exists():
        return True
    read_from = instance._state.db
    if read_from in (None, rows.db):
        return False
    # The key that the instance has now is on another shard than the row was read from. Either the
    # key has moved, or somebody has assigned another key.
    former = rows.using(read_from).filter(pk=pk)
    return bool(former.exclude(**{options.key.attname: options.key_of(instance)}).exists())
