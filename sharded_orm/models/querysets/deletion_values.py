"""Checks of the instances that a deletion gives to other rows, by ``on_delete=models.SET(…)``.

Django's collector notes these values while it collects the rows to delete, and writes them before
it deletes. It writes them with an UPDATE of its own, not with ``update()`` of the queryset. So the
checks of ``update(album=album)`` are made here. The instance must be on the shard of the rows, and
have their key.
"""

from __future__ import annotations

from typing import Any

from django.db.models import Model, QuerySet

from sharded_orm.cache.request_cache import uncached
from sharded_orm.models.querysets.bulk_writes import refuse_rows_of_other_shards
from sharded_orm.models.sharding.options import ShardOptions, required_options, shard_options
from sharded_orm.models.sharding.same_key import (
    joined_instances,
    known_key,
    refuse_values_of_other_key,
)


def check_before_deletion(collector: Any) -> None:
    """Let ``collector.delete()`` check what it writes, before it sends anything.

    A check during the collection would be too early, because the collector may find later that it
    also deletes the rows to which it gives the instance.

    :param collector: Django's collector, which collects rows now.
    """
    if "delete" in collector.__dict__:
        return

    def delete() -> Any:
        del collector.delete  # From now on, this is the method of the class again.
        refuse_values_of_deletion(collector)
        return collector.delete()

    collector.delete = delete


def refuse_values_of_deletion(collector: Any) -> None:
    """Raise an error if rows would refer to an instance of another shard or shard key.

    If the collector also deletes the rows that get the instance, the instance may have another
    shard key, but must be on their shard. Otherwise the foreign keys could not be written, because
    MariaDB and MySQL check at once that the instance exists.

    Cost: one query for each batch of rows that would get an instance.

    :param collector: Django's collector, which has collected all rows.
    :raises CrossShardRelation: the instance is on another shard.
    :raises CrossKeyRelation: the instance has another shard key.
    """
    with uncached():
        for (field, value), batches in collector.field_updates.items():
            options = shard_options(field.model)
            # A model of a migration has no options, so its shards are not known. Skip it.
            if options is not None and isinstance(value, Model):
                for rows in batches:
                    if isinstance(rows, QuerySet):
                        _refuse_value(collector, options, field, value, rows)


def _refuse_value(
    collector: Any, options: ShardOptions, field: Any, value: Model, rows: QuerySet[Any]
) -> None:
    if not rows.exists():
        return
    values = {field.name: value}
    refuse_rows_of_other_shards(options, [value], collector.using)
    if options.key is None or not joined_instances(options, values):
        return
    related_key = known_key(required_options(value.__class__), value, load=True)
    if related_key is None:
        return
    attname = options.key.attname
    of_other_key = rows.exclude(**{attname: related_key}).order_by(attname)
    keys = dict(of_other_key.values_list("pk", attname))
    deleted = _deleted(collector, field.model) if keys else set()
    for pk, key in keys.items():
        if pk not in deleted:
            refuse_values_of_other_key(options, options.key.get_prep_value(key), values)


def _deleted(collector: Any, model: Any) -> set[Any]:
    """Return the primary keys of the rows of ``model`` that ``collector`` deletes."""
    table = model._meta.concrete_model
    deleted = {
        row.pk
        for collected, instances in collector.data.items()
        if collected._meta.concrete_model is table
        for row in instances
    }
    for rows in collector.fast_deletes:
        if isinstance(rows, QuerySet) and rows.model._meta.concrete_model is table:
            deleted.update(rows.values_list("pk", flat=True))
    return deleted
