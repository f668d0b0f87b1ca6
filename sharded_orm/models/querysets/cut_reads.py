"""Refuses writes of several shards if a server would cut the rows that Django reads before them.

A ``sql_select_limit`` (MariaDB and MySQL) is such a setting of a server. It would apply on each
shard, so more rows would be written than in one database. The checks send no query, except to a
node of which this process has no settings yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django.db.models.deletion import Collector
from django.db.models.sql import Query, UpdateQuery

from sharded_orm.backends.group.shard_connections import connection_of
from sharded_orm.scatter import Target
from sharded_orm.scatter.refusals import check_server


def refuse_cut_deletion(model: Any, targets: Sequence[Target]) -> None:
    """Raise an error if a server would cut the rows of ``model`` that ``delete()`` reads first.

    :param targets: the shards, at least one.
    :raises ScatterNotSupported: a server has a ``sql_select_limit``, and ``delete()`` does not
        delete the rows of a shard by one statement.
    """
    alias = targets[0].shard.alias
    if not Collector(using=alias).can_fast_delete(model._base_manager.using(alias)):
        _refuse_cut_reads(targets)


def refuse_cut_update(query: Query, values: Mapping[str, Any], targets: Sequence[Target]) -> None:
    """Raise an error if a server would cut the ids that ``update()`` reads first.

    :param query: the query for the rows to update.
    :param values: the new values, by the names of the fields.
    :param targets: the shards, at least one.
    :raises ScatterNotSupported: a server has a ``sql_select_limit``, and ``update()`` does not
        write the rows of a shard by one statement.
    """
    update: Any = query.chain(UpdateQuery)
    update.add_update_values(values)
    features = connection_of(targets[0].shard.alias).features
    # The same conditions as in SQLUpdateCompiler.pre_sql_setup(): fields of a parent in multi-table
    # inheritance, or a join on a server that cannot read the table that it updates.
    if update.related_updates or (
        update.count_active_tables() > 1 and not features.update_can_self_select
    ):
        _refuse_cut_reads(targets)


def _refuse_cut_reads(targets: Sequence[Target]) -> None:
    for alias in {target.shard.node: target.shard.alias for target in targets}.values():
        wrapper: Any = connection_of(alias)
        # The pool knows the settings of the server when it has opened a session. If it has none
        # yet, reading these data opens one.
        getattr(wrapper, "mysql_server_data", None)
        if wrapper.features.can_union_shards:
            check_server(wrapper.node_pool.most_rows, sorts_short=False)
