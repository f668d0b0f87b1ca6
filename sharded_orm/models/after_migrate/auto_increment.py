"""Where the tables of packed ids begin to count on each shard (P1, P5).

A table's counter starts at the first id of its shard and type. ``CREATE TABLE … LIKE``,
``TRUNCATE`` and a replayed definition put it back to 1, so it is set after each
``migrate`` (and ``flush``) of a shard, and by the makers of test shards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from django.apps import AppConfig, apps
from django.db import connections
from django.db.models import Model

from sharded_orm.models.fields.embedding import shard_of
from sharded_orm.models.fields.packed import PackedIDField
from sharded_orm.models.sharding.options import shard_options
from sharded_orm.topology.model import Shard

_NEXT = re.compile(r"\n\) [^\n]*?\bAUTO_INCREMENT=(\d+)")


def first_ids(shard: Shard, models: Iterable[type[Model]] | None = None) -> dict[str, int]:
    """Table -> the first id that it counts, of the packed ids that ``shard`` holds.

    :param models: by default all models of the project.
    """
    ids = {}
    for model in apps.get_models() if models is None else models:
        options = shard_options(model)
        if options is None or options.group != shard.group or model._meta.proxy:
            continue
        for field in model._meta.local_fields:
            if isinstance(field, PackedIDField):
                ids[model._meta.db_table] = field.counted_on(shard).start
    return ids


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
    connection = connections[using]
    with connection.cursor() as cursor:
        tables = set(connection.introspection.table_names(cursor))
        firsts_present = {table: first for table, first in firsts.items() if table in tables}
        if connection.vendor == "mysql":
            set_counters_mysql(cursor, firsts_present)
        elif connection.vendor == "sqlite":
            set_counters_sqlite(cursor.execute, firsts_present)


def set_counters_mysql(cursor: Any, firsts: dict[str, int]) -> None:
    """Raise the counters of these tables of the current schema that are lower.

    One that is higher stays: lowering it would hand out ids of deleted rows again.
    """
    for table, first in firsts.items():
        quoted = "`{}`".format(table.replace("`", "``"))
        # information_schema may be a day old on MySQL; this is what holds.
        cursor.execute(f"SHOW CREATE TABLE {quoted}")
        counter = _NEXT.search(cursor.fetchone()[1])
        if counter is None or int(counter[1]) < first:
            cursor.execute(f"ALTER TABLE {quoted} AUTO_INCREMENT = {first}")


def set_counters_sqlite(execute: Callable[[str], Any], firsts: dict[str, int]) -> None:
    """The same on SQLite, where a counter is the last number of a table."""
    for table, first in firsts.items():
        quoted, last = "'{}'".format(table.replace("'", "''")), first - 1
        execute(f"UPDATE sqlite_sequence SET seq = {last} WHERE name = {quoted} AND seq < {last}")
        execute(
            f"INSERT INTO sqlite_sequence (name, seq) SELECT {quoted}, {last} WHERE NOT EXISTS"
            f" (SELECT 1 FROM sqlite_sequence WHERE name = {quoted})"
        )
