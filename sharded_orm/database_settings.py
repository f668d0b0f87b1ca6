"""The settings of the databases behind the aliases of shards and groups, made from the topology in use."""

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
    """Return ``photos`` for the template alias ``photos_template``; None for any other alias.

    A template is a schema with the tables of a shard group, but without users' rows. A test run
    clones the group's shards from the template.
    """
    name = alias.removesuffix(TEMPLATE_SUFFIX)
    return name if name != alias and name in runtime.topology().groups else None


def alias_settings(alias: str) -> dict[str, Any] | None:
    """Return the settings of the shard ``alias``, as an entry of ``DATABASES``.

    None if there is no such shard.
    """
    current = runtime.topology()
    shard = current.resolve(alias)
    return None if shard is None else shard_settings(shard, current)


def shard_settings(shard: Shard, among: Topology | None = None) -> dict[str, Any]:
    """Return the settings of ``shard``, as an entry of ``DATABASES``.

    ``GENERATION`` in the result counts the topologies that the process has used so far. If the
    count has grown since, the connection knows that the topology has changed.

    :param among: the topology that ``shard`` was taken from; by default the topology in use.
    """
    # Read the generation (the count of topologies used so far) before the topology. If the topology
    # is replaced between the two reads, the generation is too old. Then the connection looks up its
    # settings once more, which does no harm. In the reverse order, it would keep outdated settings.
    generation = relocation.generation
    node = _application_settings((among or runtime.topology()).nodes[shard.node])
    return {**node, **_database_of(node, shard.schema), "SHARD": shard, "GENERATION": generation}


def _database_of(node: Mapping[str, Any], schema: str) -> dict[str, Any]:
    """Return the settings that name the database or file of ``schema`` on ``node``."""
    engine = load_backend(node["ENGINE"]).DatabaseWrapper
    database: dict[str, Any] = engine.database_of(node, schema)
    return database


def settings_as_planned(shard: Shard) -> dict[str, Any] | None:
    """Return complete connection settings for the schema of ``shard`` on the node ``shard.node``.

    The settings lead to that node even if the topology in use has the shard on another node. Return
    None if the node no longer exists.
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

    That account is the entry ``OPERATOR`` of the node. Return None if the node has no such entry.
    """
    node_settings = runtime.topology().nodes[node]
    account = node_settings.get("OPERATOR")
    return {**_application_settings(node_settings), **account} if account else None


def group_settings(group: ShardGroup, among: Topology | None = None) -> dict[str, Any]:
    """Return the entry of ``DATABASES`` for the alias that stands for the whole shard group ``group``.

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
    """The ``Resolver`` that ``DATABASES`` uses: it finds groups and shards in the topology in use."""

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
