"""Makes the database settings of shards and groups from the topology in use.

``DATABASES`` has no entries for them: their aliases are looked up here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db.utils import load_backend

from sharded_orm import runtime
from sharded_orm.backends.group import relocation
from sharded_orm.topology.aliases import GROUP_ENGINE, complete
from sharded_orm.topology.model import Shard, ShardGroup, Topology

TEMPLATE_SUFFIX = "_template"


def template_group(alias: str) -> str | None:
    """Return ``photos`` for the template alias ``photos_template``; None for an alias that is no
    template.

    A template is a schema with the tables of a shard group and without users' rows. A test run
    clones it to make the shards of the group.
    """
    name = alias.removesuffix(TEMPLATE_SUFFIX)
    return name if name != alias and name in runtime.topology().groups else None


def alias_settings(alias: str) -> dict[str, Any] | None:
    """Return the settings of the shard ``alias``, in the form of an entry of ``DATABASES``.

    None if there is no such shard.
    """
    current = runtime.topology()
    shard = current.resolve(alias)
    return None if shard is None else shard_settings(shard, current)


def shard_settings(shard: Shard, among: Topology | None = None) -> dict[str, Any]:
    """Return the settings of ``shard``, in the form of an entry of ``DATABASES``.

    The entry ``GENERATION`` is the number of topologies that this process has used so far. A
    connection compares it with the present number, to find out that the topology was replaced.

    :param among: the topology that ``shard`` was taken from; by default the topology in use.
    """
    # Read the generation (the number of topologies used so far) before the topology. The topology
    # may be replaced in between. Then the generation is too low, and the connection only looks up
    # its settings once more. In the other order, it would keep outdated settings.
    generation = relocation.generation
    node = _application_settings((among or runtime.topology()).nodes[shard.node])
    return {**node, **_database_of(node, shard.schema), "SHARD": shard, "GENERATION": generation}


def _database_of(node: Mapping[str, Any], schema: str) -> dict[str, Any]:
    """Return the settings that select ``schema`` on ``node``, such as ``{"NAME": "photos_00042"}``
    on MySQL.

    A schema is a database on MariaDB and MySQL, a schema on PostgreSQL, and a file on SQLite.
    """
    engine = load_backend(node["ENGINE"]).DatabaseWrapper
    database: dict[str, Any] = engine.database_of(node, schema)
    return database


def settings_as_planned(shard: Shard) -> dict[str, Any] | None:
    """Return complete connection settings for the schema of ``shard`` on the node ``shard.node``.

    Use this for a query that was prepared with an older topology. The settings lead to the node in
    ``shard``, even if the shard has moved to another node since. Return None if the node is not in
    the topology any more.
    """
    current = runtime.topology()
    return complete(shard_settings(shard, current)) if shard.node in current.nodes else None


def _application_settings(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a node without ``OPERATOR``, ``REPLICATION`` and ``CAPACITY``.

    ``OPERATOR`` and ``REPLICATION`` are accounts that only operators' commands may use or show.
    ``CAPACITY`` does not concern the connection.
    """
    others = ("OPERATOR", "REPLICATION", "CAPACITY")
    return {key: value for key, value in node.items() if key not in others}


def operator_settings(node: str) -> dict[str, Any] | None:
    """Return the settings of ``node``, with the user and password of the operators' account.

    The entry ``OPERATOR`` of the node has this account. Return None if the node has no such entry.
    """
    node_settings = runtime.topology().nodes[node]
    account = node_settings.get("OPERATOR")
    return {**_application_settings(node_settings), **account} if account else None


def group_settings(group: ShardGroup, among: Topology | None = None) -> dict[str, Any]:
    """Return the settings for the alias of the shard group ``group``, which stands for all its
    shards.

    They have the form of an entry of ``DATABASES``.

    :param among: the topology that ``group`` was taken from; by default the topology in use.
    """
    generation = relocation.generation
    node = _application_settings((among or runtime.topology()).nodes[group.ranges[0].primary])
    return {
        **node,
        "GENERATION": generation,
        "ENGINE": GROUP_ENGINE,
        "NODE_ENGINE": node["ENGINE"],
        "NAME": group.name,
        "GROUP": group.name,
        "ATOMIC_REQUESTS": group.atomic_requests,
        "MAX_IDLE_ALIASES": runtime.config().max_idle_aliases,
    }


class CurrentAliases:
    """Gives ``DATABASES`` the settings of groups and shards, from the topology in use.

    Implements :class:`~sharded_orm.topology.aliases.Resolver`.
    """

    @staticmethod
    def group_aliases() -> dict[str, dict[str, Any]]:
        current = runtime.topology()
        return {name: group_settings(group, current) for name, group in current.groups.items()}

    @staticmethod
    def shard_alias(alias: str) -> dict[str, Any] | None:
        return alias_settings(alias)

    @staticmethod
    def is_shard(alias: str) -> bool:
        return runtime.topology().resolve(alias) is not None
