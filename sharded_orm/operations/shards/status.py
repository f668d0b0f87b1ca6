"""Read which nodes answer, which shards exist and are migrated, and how large the shards are."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from django.apps import apps
from django.db import DatabaseError, connections, router

from sharded_orm import database_settings, runtime
from sharded_orm.backends.group.member import ShardConnectionMixin
from sharded_orm.backends.group.moved_shards import has_hidden_tables
from sharded_orm.backends.sizes import ShardSize
from sharded_orm.exceptions import InvalidMigrationTarget
from sharded_orm.operations.migrate.migration_records import Records
from sharded_orm.operations.migrate.planner import MigrateOptions, Planner
from sharded_orm.operations.nodes import Alive, ask_nodes, ignore_answer, node_connection
from sharded_orm.operations.selection import numbers_text
from sharded_orm.scatter.failures import is_node_gone
from sharded_orm.topology.model import Shard, ShardGroup, server_of

#: Seconds to wait for a node's first answer.
PATIENCE = 5.0
#: Seconds to wait for each later answer of a node. Reading thousands of table sizes takes a while.
SILENCE = 60.0
#: Number of shards whose sizes one statement reads.
BATCH = 500


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """The state of one shard, as its primary reports it.

    :param state: ``"current"`` (all migrations that concern the shard are applied), ``"behind"``
        (some migrations are not applied), ``"missing"`` (there is no schema) or ``"error"`` (the
        shard cannot be read).
    :param digest: a digest of the applied migrations, equal for shards with the same migrations;
        see ``applied_digests``.
    :param behind: number of migrations that are not applied.
    :param following: the first migration that is not applied; "" if all are applied.
    :param error: why the shard cannot be read; None if it can be read.
    :param size: the size; None if it was not read.
    """

    shard: Shard
    state: str
    digest: str | None = None
    behind: int = 0
    following: str = ""
    error: str | None = None
    size: ShardSize | None = None


@dataclass(frozen=True)
class GroupOnNode:
    """The states of the selected shards of one group whose primary is on one node."""

    group: str
    shards: tuple[ShardStatus, ...]
    #: Names of schemas that look like shards of the group, but do not belong on this node.
    unexpected: tuple[str, ...] = ()

    def of_state(self, state: str) -> list[Shard]:
        return [entry.shard for entry in self.shards if entry.state == state]

    @property
    def bytes(self) -> int | None:
        """The total size of the shards in bytes; None if sizes were not read."""
        return (
            sum(entry.size.bytes for entry in self.shards if entry.size)
            if self._has_sizes
            else None
        )

    @property
    def rows(self) -> int | None:
        """The estimated number of rows; None if sizes were not read or the database has no
        estimates.
        """
        rows = [entry.size.rows for entry in self.shards if entry.size is not None]
        return sum(filter(None, rows)) if self._has_sizes and None not in rows else None

    @property
    def _has_sizes(self) -> bool:
        return any(entry.size is not None for entry in self.shards)


@dataclass(frozen=True)
class NodeStatus:
    """The state of one node.

    :param error: why the node does not answer; None if the node has answered. After an error,
        ``groups`` is empty.
    :param expected: number of selected shards whose primary is on the node, keyed by group.
    :param groups: the states of the node's shards, one item for each group.
    """

    name: str
    error: str | None
    expected: Mapping[str, int]
    groups: tuple[GroupOnNode, ...] = ()


@dataclass(frozen=True)
class FleetStatus:
    """The states of the queried nodes. ``problems`` are sentences, each with its remedy."""

    nodes: tuple[NodeStatus, ...]

    @property
    def shards(self) -> Iterator[ShardStatus]:
        return (entry for node in self.nodes for group in node.groups for entry in group.shards)

    @property
    def problems(self) -> list[str]:
        return [problem for node in self.nodes for problem in _problems(node)]


def status(
    shards: Iterable[Shard] | None = None,
    *,
    timeout: float = PATIENCE,
    sizes: bool = True,
    within: float | None = None,
) -> FleetStatus:
    """Read the states of shards from their nodes, in parallel. Changes nothing.

    Cost for each node: 5 queries for the first 500 shards, and 2 for each 500 more (without
    ``sizes``: 4 and 1). For each distinct set of applied migrations, up to 6 queries on one shard.
    On SQLite, each file is opened once. Memory: a small record for each shard.

    :param shards: the shards whose state to read. By default all shards. Then all nodes are
        queried, and schemas that are named like shards but do not belong on their node are
        reported.
    :param timeout: seconds to wait for the first answer of a node; a silent node counts as down.
    :param sizes: whether to read the sizes of shards.
    :param within: the total number of seconds to wait for a node. It replaces ``timeout``, for
        callers such as the admin, where a user waits. None means that ``timeout`` applies.
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
            )
            for node, outcome in answers.items()
        )
    )


def shards_by_node(shards: Iterable[Shard] | None) -> dict[str, list[Shard]]:
    """Return ``shards`` as lists, keyed by the node of their primary.

    If ``shards`` is None, take all shards and all nodes; nodes without shards have an empty list.
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
    """Return the text of ``error`` in one line, such as ``2002: Can't connect to server on 'db2'``."""
    text = ": ".join(map(str, error.args)) if error.args else type(error).__name__
    return " ".join(text.split())


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
    """Return a digest of each shard's applied migrations, keyed by the shard's alias.

    If a shard has no schema, the value is None. If a shard cannot be read, the value is the error.
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
    # If one shard is damaged, or if the account may not read it, the query fails for all shards. So
    # the two halves of the shards are read by separate queries.
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
    """Computes which migrations a shard lacks, once per set of applied migrations. Thread-safe."""

    def __init__(self) -> None:
        self._planner = Planner(MigrateOptions())
        self._by_state: dict[tuple[str, str], tuple[int, str]] = {}

    def of(self, shard: Shard, digest: str) -> tuple[int, str]:
        """Return how many migrations ``shard`` lacks, and the name of the first ("" if it lacks 0).

        Migrations of apps without tables in the shard's group do not count: they change nothing on
        the shard. Queries the shard if no earlier shard of the group had the same digest.

        :param digest: the digest of the shard's applied migrations; "" if no migration is applied.
        :raises InvalidMigrationTarget: the shard's migrations are inconsistent.
        """
        migrations = self._by_state.get((shard.group, digest))
        if migrations is None:
            connection = connections[shard.alias]
            applied = Records(shard.alias).applied() if digest else ()
            plan = self._planner.plan(connection, applied)
            # Squashed migrations that only need to be recorded as applied (plan.replacements) count
            # as missing, too.
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
            name: _number_parser(group) for name, group in self._topology.groups.items()
        }
        self._servers = {name: server_of(node, name) for name, node in self._topology.nodes.items()}

    def on(
        self, node: str, present: Iterable[str], wrapper: ShardConnectionMixin
    ) -> dict[str, list[str]]:
        """Return the schema names that look like shards but do not belong on ``node``, by group.

        Costs one query for each such schema. A schema that belongs to an unfinished or completed
        move of a shard is not returned.

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
            # Shards of several groups may have this schema name. Report the schema only if none of
            # these shards belongs on the node.
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
        # Compare servers and not node names, because two nodes may be the same server.
        return self._servers[node] in {self._servers[name] for name in nodes if name is not None}


def _is_moved(wrapper: ShardConnectionMixin, node: str, group: ShardGroup, number: int) -> bool:
    """Return whether a schema on ``node`` has only hidden tables, renamed by a move of a shard."""
    if number not in group:
        return False
    place = database_settings.settings_as_planned(replace(group.shard(number), node=node))
    return place is not None and has_hidden_tables(wrapper, place)


def _number_parser(group: ShardGroup) -> Callable[[str], int | None]:
    """Return a function that parses the shard number from the name of a schema.

    The function returns None if the name does not match the group's pattern. It may return a number
    beyond the group's last shard.
    """
    pattern = "".join(
        re.escape(literal)
        + {"shard": r"(\d+)", "group": re.escape(group.name), None: ""}.get(field, ".*")
        for literal, field, _, _ in string.Formatter().parse(group.database_name)
    )

    def number_of(schema: str) -> int | None:
        match = re.fullmatch(pattern, schema)
        if match is None:
            return None
        number = int(match[1])
        return number if group.schema_name(number) == schema else None

    return number_of


def _problems(node: NodeStatus) -> Iterator[str]:
    if node.error is not None:
        counts = ", ".join(f"{count} of {group!r}" for group, count in node.expected.items())
        yield (
            f"Node {node.name!r} does not answer ({node.error})"
            + (f": nothing is known of its shards, {counts}." if counts else ".")
            + " Mend it, or the node's HOST, PORT, USER and PASSWORD, and check again."
        )
    for group in node.groups:
        yield from _group_problems(node.name, group)


def _group_problems(node: str, on_node: GroupOnNode) -> Iterator[str]:
    if missing := on_node.of_state("missing"):
        yield (
            f"{_count_phrase(missing)} on {node!r} not created: {aliases_text(missing)}. Run 'manage.py shards"
            f" create {selection_options(missing)}', then 'manage.py migrate_shards {selection_options(missing)}'."
        )
    if behind := on_node.of_state("behind"):
        first = next(
            shard_status for shard_status in on_node.shards if shard_status.state == "behind"
        )
        yield (
            f"{_count_phrase(behind)} on {node!r} behind: {aliases_text(behind)}; the first lacks {first.behind}"
            f" migrations from {first.following} on. Run 'manage.py migrate_shards"
            f" {selection_options(behind)}'."
        )
    yield from _error_problems(node, on_node)
    yield from _schema_problems(node, on_node)


def _error_problems(node: str, on_node: GroupOnNode) -> Iterator[str]:
    """Yield one sentence for all shards whose errors differ only in the name of the shard."""
    by_error: dict[str, list[ShardStatus]] = {}
    for entry in on_node.shards:
        if entry.error is not None:
            error = entry.error.replace(entry.shard.alias, "").replace(entry.shard.schema, "")
            by_error.setdefault(error, []).append(entry)
    for entries in by_error.values():
        shards, text = [entry.shard for entry in entries], entries[0].error
        look = f"'manage.py shards sql {shards[0].alias}'."
        if len(shards) == 1:
            yield f"Shard {shards[0].alias!r} on {node!r} cannot be read ({text}). Look at it with {look}"
        else:
            yield (
                f"{len(shards)} shards of {on_node.group!r} on {node!r} cannot be read:"
                f" {aliases_text(shards)} ({text}). Look at the first with {look}"
            )


def _schema_problems(node: str, on_node: GroupOnNode) -> Iterator[str]:
    """Yield sentences about unexpected schemas on the node ``node``.

    All schemas whose shards are on the same other node share one sentence. So do all schemas of
    shards that do not exist.
    """
    group = runtime.topology().groups.get(on_node.group)
    by_home: dict[str | None, list[tuple[str, Shard | None]]] = {}
    for schema in on_node.unexpected:
        number = _number_parser(group)(schema) if group is not None else None
        shard = None
        if group is not None and number is not None and number in group:
            shard = group.shard(number)
        by_home.setdefault(shard.node if shard else None, []).append((schema, shard))
    for home, schemas in by_home.items():
        schema, shard = schemas[0]
        if len(schemas) == 1:
            why = f"group {on_node.group!r} has no such shard"
            if shard is not None:
                why = f"shard {shard.number} of {on_node.group!r} is on {home!r}"
            yield (
                f"Schema {schema!r} does not belong on node {node!r}: {why}. If it is a copy that"
                " nobody needs, drop it; if it holds the rows, correct RANGES."
            )
            continue
        why = f"group {on_node.group!r} has no such shards"
        if home is not None:
            why = f"these shards of {on_node.group!r} are on {home!r}"
        yield (
            f"{len(schemas)} schemas do not belong on node {node!r}: {_first_five(repr(name) for name, _ in schemas)};"
            f" {why}. If they are copies that nobody needs, drop them; if they hold the rows, correct"
            " RANGES."
        )


def _count_phrase(shards: Sequence[Shard]) -> str:
    is_single = len(shards) == 1
    return (
        f"{len(shards)} shard{'' if is_single else 's'} of {shards[0].group!r}"
        f" {'is' if is_single else 'are'}"
    )


def aliases_text(shards: Sequence[Shard]) -> str:
    return _first_five(shard.alias for shard in shards)


def _first_five(names: Iterable[str]) -> str:
    all_names = list(names)
    more = len(all_names) - 5
    return ", ".join(all_names[:5]) + (f" and {more} more" if more > 0 else "")


def selection_options(shards: Sequence[Shard]) -> str:
    """Return command options that select ``shards``, such as ``--group photos --shards 0-7``.

    :param shards: shards of one group, sorted by number.
    """
    return f"--group {shards[0].group} --shards {numbers_text(shards)}"
