"""Find out which nodes answer, which shards exist and are migrated, and how large they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, connections, router

from sharded_orm import database_settings, runtime
from sharded_orm.backends.group.member import ShardConnectionMixin
from sharded_orm.backends.group.moved_shards import has_hidden_tables
from sharded_orm.backends.sizes import ShardSize
from sharded_orm.operations.exceptions import InvalidMigrationTarget
from sharded_orm.operations.migrate.migration_records import Records
from sharded_orm.operations.migrate.planner import MigrateOptions, Planner
from sharded_orm.operations.nodes import Alive, ask_nodes, ignore_answer, node_connection
from sharded_orm.operations.shards.closed_nodes import closed_remedy
from sharded_orm.operations.shards.fleet_status import (
    FleetStatus,
    GroupOnNode,
    NodeStatus,
    ShardStatus,
    number_parser,
)
from sharded_orm.scatter.failures import is_node_gone
from sharded_orm.topology.model import Shard, ShardGroup, server_of

#: Seconds to wait for a node's first answer.
PATIENCE = 5.0
#: Seconds to wait for each answer of a node after its first. This is longer than ``PATIENCE``,
#: because a node needs a while to return the sizes of thousands of tables.
SILENCE = 60.0
#: Number of shards whose sizes one statement reads.
BATCH = 500


def status(
    shards: Iterable[Shard] | None = None,
    *,
    timeout: float = PATIENCE,
    sizes: bool = True,
    within: float | None = None,
) -> FleetStatus:
    """Read the states of shards from their nodes, in parallel. Changes nothing.

    Cost for each node: 5 queries for the first 500 shards, and 2 for each 500 more (without
    ``sizes``: 4 and 1). For each different set of applied migrations, up to 6 queries of one
    shard. On SQLite, each file is opened once. Memory: a small record for each shard.

    :param shards: the shards whose state to read. By default, all shards are read. Then all nodes
        are queried, and a schema is reported if it is named like a shard, but does not belong on
        its node.
    :param timeout: seconds to wait for the first answer of a node; a silent node counts as down.
    :param sizes: whether to read the sizes of shards.
    :param within: the number of seconds for all answers of a node together. It replaces ``timeout``
        where a user waits, as in the admin.
    """
    by_node = shards_by_node(shards)
    pending = _MissingMigrations()
    unexpected = _Unexpected() if shards is None else None

    def read(node: str, alive: Alive) -> tuple[GroupOnNode, ...]:
        with node_connection(node) as wrapper:
            on_answer = alive if within is None else ignore_answer
            return _read_node(
                wrapper, node, by_node[node], on_answer, pending, unexpected, sizes=sizes
            )

    first_answer = timeout if within is None else within
    answers = ask_nodes(by_node, read, patience=first_answer, silence=max(SILENCE, first_answer))
    return FleetStatus(
        tuple(
            NodeStatus(
                node,
                error_line(outcome) if isinstance(outcome, Exception) else None,
                {group: len(members) for group, members in by_group(by_node[node]).items()},
                () if isinstance(outcome, Exception) else outcome,
                isinstance(outcome, ImproperlyConfigured),
                closed_remedy(node, outcome) if isinstance(outcome, Exception) else "",
            )
            for node, outcome in answers.items()
        )
    )


def shards_by_node(shards: Iterable[Shard] | None) -> dict[str, list[Shard]]:
    """Return a dict that maps the name of each node to those of ``shards`` whose primary it is.

    If ``shards`` is None, the dict has all shards and all nodes, even nodes without a shard.
    """
    topology = runtime.topology()
    by_node: dict[str, list[Shard]] = {}
    if shards is None:
        by_node = {name: [] for name in topology.nodes}
        shards = (shard for group in topology.groups.values() for shard in group.shards())
    for shard in shards:
        by_node.setdefault(shard.node, []).append(shard)
    return by_node


def by_group(shards: Iterable[Shard]) -> dict[str, list[Shard]]:
    groups: dict[str, list[Shard]] = {}
    for shard in shards:
        groups.setdefault(shard.group, []).append(shard)
    return groups


def error_line(error: Exception) -> str:
    """Return the text of ``error`` in one line, such as ``2002: Can't connect to server on 'db2'``.

    The text has no full stop, so that it can be put in the middle of a sentence.
    """
    text = ": ".join(map(str, error.args)) if error.args else type(error).__name__
    return " ".join(text.split()).removesuffix(".")


def _read_node(
    wrapper: ShardConnectionMixin,
    node: str,
    shards: Sequence[Shard],
    alive: Alive,
    pending: _MissingMigrations,
    unexpected: _Unexpected | None,
    *,
    sizes: bool,
) -> tuple[GroupOnNode, ...]:
    present = wrapper.schemas_present()
    alive()
    existing = [shard for shard in shards if shard.schema in present]
    digests = _digests(wrapper, existing)
    alive()
    sizes_by_alias: dict[str, ShardSize] = {}
    for start in range(0, len(existing) if sizes else 0, BATCH):
        sizes_by_alias |= wrapper.shard_sizes(existing[start : start + BATCH])
        alive()
    grouped = by_group(shards)
    unexpected_schemas = unexpected.on(node, present, wrapper) if unexpected is not None else {}
    groups = []
    for group in {**grouped, **unexpected_schemas}:
        groups.append(
            GroupOnNode(
                group,
                tuple(
                    _shard_status(
                        shard, digests.get(shard.alias), pending, sizes_by_alias.get(shard.alias)
                    )
                    for shard in grouped.get(group, ())
                ),
                tuple(unexpected_schemas.get(group, ())),
            )
        )
        alive()
    return tuple(groups)


def _digests(
    wrapper: ShardConnectionMixin, shards: Sequence[Shard]
) -> dict[str, str | DatabaseError | None]:
    """Return a dict that maps the alias of each shard to a digest of its applied migrations.

    A digest is a short text: two shards with the same digest have the same applied migrations. If a
    shard cannot be read, its alias is mapped to the error. If it has no schema, its alias is mapped
    to None.
    """
    if not shards:
        return {}
    try:
        return dict(wrapper.applied_digests(shards))
    except DatabaseError as exc:
        if is_node_gone(exc):
            raise
        if len(shards) == 1:
            return {shards[0].alias: exc}
    # The query fails for all shards if one of them is damaged, or if the account may not read it.
    # To find this shard and to read the others, query each half of the shards separately.
    middle = len(shards) // 2
    return _digests(wrapper, shards[:middle]) | _digests(wrapper, shards[middle:])


def _shard_status(
    shard: Shard,
    digest: str | DatabaseError | None,
    pending: _MissingMigrations,
    size: ShardSize | None,
) -> ShardStatus:
    if digest is None:
        return ShardStatus(shard, "missing")
    if isinstance(digest, DatabaseError):
        return ShardStatus(shard, "error", error=error_line(digest), size=size)
    try:
        behind, following = pending.of(shard, digest)
    except InvalidMigrationTarget as exc:
        return ShardStatus(shard, "error", error=str(exc), size=size)
    state = "behind" if behind else "current"
    return ShardStatus(shard, state, digest, behind, following, size=size)


class _MissingMigrations:
    """Finds out which migrations a shard lacks.

    Shards with the same applied migrations lack the same migrations, so only the first of them is
    queried. Thread-safe.
    """

    def __init__(self) -> None:
        self._planner = Planner(MigrateOptions())
        self._by_state: dict[tuple[str, str], tuple[int, str]] = {}

    def of(self, shard: Shard, digest: str) -> tuple[int, str]:
        """Return how many migrations ``shard`` lacks, and the name of the first ("" if it lacks 0).

        Migrations of apps that have no tables on the shard do not count. If an earlier shard of the
        group had the same digest, its result is returned. Otherwise the shard is queried.

        :param digest: a short text that identifies the shard's applied migrations; "" if it has
            none.
        :raises InvalidMigrationTarget: the shard's migrations are inconsistent.
        """
        migrations = self._by_state.get((shard.group, digest))
        if migrations is None:
            connection = connections[shard.alias]
            applied = Records(shard.alias).applied() if digest else ()
            plan = self._planner.plan(connection, applied)
            # Count the squashed migrations in plan.replacements as missing, too. All migrations
            # that they replace are applied, so they need only be recorded as applied.
            keys = [*(unit.key for unit in plan.units), *plan.replacements]
            names = [".".join(key) for key in keys if _has_tables(key[0], shard.alias)]
            migrations = self._by_state[shard.group, digest] = (len(names), next(iter(names), ""))
            connection.close()
        return migrations


def _has_tables(app_label: str, alias: str) -> bool:
    """Return whether migrations of an app may change the database ``alias``."""
    models = apps.get_app_config(app_label).get_models(include_auto_created=True)
    return router.allow_migrate(alias, app_label) or any(
        router.allow_migrate_model(alias, model) for model in models
    )


class _Unexpected:
    """Finds schemas that are named like a shard, on a node where that shard does not belong."""

    def __init__(self) -> None:
        self._topology = runtime.topology()
        self._numbers = {
            name: number_parser(group) for name, group in self._topology.groups.items()
        }
        self._servers = {name: server_of(node, name) for name, node in self._topology.nodes.items()}

    def on(
        self, node: str, present: Iterable[str], wrapper: ShardConnectionMixin
    ) -> dict[str, list[str]]:
        """Return the schemas on ``node`` that do not belong there, as a dict from group to names.

        Such a schema is named like a shard, but the topology does not place the shard on ``node``.
        If a move of the shard has renamed the tables of the schema, the schema is left out, because
        the move is responsible for it. Costs one query for each schema that seems not to belong on
        ``node``.

        :param present: the names of all schemas on ``node``.
        :param wrapper: a connection object of the node.
        """
        schemas: dict[str, list[str]] = {}
        for schema in sorted(present):
            owners = [
                (group, number)
                for name, group in self._topology.groups.items()
                if (number := self._numbers[name](schema)) is not None
            ]
            # Shards of several groups may have the same schema name. Report the schema only if none
            # of these shards belongs on the node.
            if (
                owners
                and not any(self._belongs(node, *owner) for owner in owners)
                and not any(_is_moved(wrapper, node, *owner) for owner in owners)
            ):
                schemas.setdefault(owners[0][0].name, []).append(schema)
        return schemas

    def _belongs(self, node: str, group: ShardGroup, number: int) -> bool:
        if number not in group:
            return False
        nodes = (group.shard(number).node, group.shard(number).replica)
        # Compare servers and not node names, because two names may stand for the same server.
        return self._servers[node] in {self._servers[name] for name in nodes if name is not None}


def _is_moved(wrapper: ShardConnectionMixin, node: str, group: ShardGroup, number: int) -> bool:
    """Return whether a move of the shard has renamed its tables on ``node``."""
    if number not in group:
        return False
    place = database_settings.settings_as_planned(replace(group.shard(number), node=node))
    return place is not None and has_hidden_tables(wrapper, place)
