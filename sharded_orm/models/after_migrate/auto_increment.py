"""Where the tables of packed ids begin to count on each shard (P1, P5).

A table's counter starts at the first id of its shard and type. ``CREATE TABLE … LIKE``,
``TRUNCATE`` and a replayed definition put it back to 1, so it is set after each
``migrate`` (and ``flush``) of a shard, and by the makers of test shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from django.apps import AppConfig, apps
from django.db import connections
from django.db.models import Model

from sharded_orm.models.fields.embedding import shard_of
from sharded_orm.models.fields.packed import PackedIDField
from sharded_orm.models.sharding.options import shard_options
from sharded_orm.topology.model import Shard


def first_ids(shard: Shard, models: Iterable[type[Model]] | None = None) -> dict[str, int]:
    """Table -> the first id that it counts, of the packed ids that ``shard`` holds.

    :param models: by default all models of the project.
    """
    found = {}
    for model in apps.get_models() if models is None else models:
        options = shard_options(model)
        if options is None or options.group != shard.group or model._meta.proxy:
            continue
        for field in model._meta.local_fields:
            if isinstance(field, PackedIDField):
                found[model._meta.db_table] = field.counted_on(shard).start
    return found


def after_migrate(
    sender: AppConfig, using: str, counted: Mapping[str, int] | None = None, **kwargs: Any
) -> None:
    """Receiver of ``post_migrate``: set the counters of the shard ``using``.

    :param counted: table -> a number that its next one is not below, where ``migrate_shards`` has
        read it since the table was made.

    Costs nothing for an app without packed ids, or whose tables all are counted far enough; else
    a list of the tables, and per table with packed ids one query (MySQL, MariaDB: two when it has
    to be set).
    """
    shard = shard_of(using)
    firsts = first_ids(shard, sender.get_models()) if shard is not None else {}
    if all((counted or {}).get(table, 0) >= first for table, first in firsts.items()):
        return
    connection: Any = connections[using]
    with connection.cursor() as cursor:
        present = set(connection.introspection.table_names(cursor))
        wanted = {table: first for table, first in firsts.items() if table in present}
        connection.ops.raise_counters(cursor, wanted)
