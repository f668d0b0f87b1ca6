"""Sets the id counters of tables with packed ids to the shard's first id (Pinterest, P1, P5).

A packed id consists of the shard, a type and a local number. The table's counter generates the
whole id, so it must start at the first id of its shard and type. But ``CREATE TABLE … LIKE``,
``TRUNCATE`` and a replayed table definition reset the counter to 1. So the counter is set after
each ``migrate`` and ``flush`` of a shard, and when test shards are cloned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from django.apps import AppConfig, apps
from django.db import connections
from django.db.models import Model

from sharded_orm.models.fields.generated_id import shard_of
from sharded_orm.models.fields.packed import PackedIDField
from sharded_orm.models.sharding.options import shard_options
from sharded_orm.topology.model import Shard


def counted_ids(shard: Shard, models: Iterable[type[Model]] | None = None) -> dict[str, range]:
    """Return the range of packed ids that each table may generate on ``shard``, keyed by table.

    :param models: the models whose tables to include; None means all models of the project.
    """
    ids = {}
    for model in apps.get_models() if models is None else models:
        options = shard_options(model)
        if options is None or options.group != shard.group or model._meta.proxy:
            continue
        for field in model._meta.local_fields:
            if isinstance(field, PackedIDField):
                ids[model._meta.db_table] = field.counted_on(shard)
    return ids


def first_ids(shard: Shard, models: Iterable[type[Model]] | None = None) -> dict[str, int]:
    """Return the first packed id that each table may generate on ``shard``, keyed by table."""
    return {table: ids.start for table, ids in counted_ids(shard, models).items()}


def after_migrate(
    sender: AppConfig, using: str, counted: Mapping[str, int] | None = None, **kwargs: Any
) -> None:
    """Receiver of ``post_migrate``: raise the auto-increment counters on the shard ``using``.

    A counter that is lower than the first packed id of its table and shard is set to this id.

    :param counted: maps the name of a table to a number. The next id of its counter is at least
        this number. The command ``migrate_shards`` has read these numbers. None if they are
        unknown.

    Cost: no query if the app has no packed ids (ids that contain the shard number), or if
    ``counted`` shows that all counters are high enough. Otherwise one query for the list of tables,
    and at most two queries for each table with packed ids.
    """
    shard = shard_of(using)
    firsts = first_ids(shard, sender.get_models()) if shard is not None else {}
    if all((counted or {}).get(table, 0) >= first for table, first in firsts.items()):
        return
    connection: Any = connections[using]
    with connection.cursor() as cursor:
        present = connection.ops.tables_among(cursor, firsts)
        connection.ops.raise_counters(cursor, {table: firsts[table] for table in present})
