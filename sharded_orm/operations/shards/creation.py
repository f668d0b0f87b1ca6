"""Create the missing schemas of shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from django.db import DatabaseError, connections

from sharded_orm.backends.group.member import ShardConnectionMixin
from sharded_orm.operations.nodes import Alive, ask_nodes, node_connection
from sharded_orm.operations.shards.status import PATIENCE, error_line, shards_by_node
from sharded_orm.scatter.failures import is_node_gone
from sharded_orm.topology.model import Shard

#: The largest number of seconds to wait for the creation of one schema.
SILENCE = 60.0


@dataclass(frozen=True)
class Created:
    """The result of :func:`create`.

    :param made: aliases of the shards whose schema was created, sorted.
    :param existing: number of shards whose schema existed before.
    :param failures: maps the alias of a shard to the reason why its schema could not be created. If
        no schema of a node could be created, for example because the node does not answer, maps the
        name of the node to the reason.
    """

    made: tuple[str, ...]
    existing: int
    failures: dict[str, str]


def create(
    shards: Iterable[Shard],
    *,
    timeout: float = PATIENCE,
    progress: Callable[[Shard, bool], None] | None = None,
) -> Created:
    """Create an empty schema (SQLite: a file) for each of ``shards`` that has no schema.

    Works on all nodes in parallel. Existing schemas stay as they are. The call can be repeated, and
    several processes can call this at the same time. Costs one query per node, and one database
    session for each new schema.

    :param timeout: seconds to wait for the first answer of a node.
    :param progress: a function that is called for each shard whose schema exists now. It gets the
        shard, and True if this call has created the schema. Several threads call it.
    """
    by_node = shards_by_node(shards)

    def create_missing(node: str, alive: Alive) -> tuple[list[str], int, dict[str, str]]:
        with node_connection(node) as wrapper:
            present = wrapper.schemas_present()
        alive()
        created_here: list[str] = []
        failures: dict[str, str] = {}
        for shard in by_node[node]:
            if shard.schema not in present:
                try:
                    _create_schema(shard)
                except (DatabaseError, OSError) as exc:
                    if isinstance(exc, DatabaseError) and is_node_gone(exc):
                        raise
                    failures[shard.alias] = error_line(exc)
                    continue
                created_here.append(shard.alias)
                alive()
            if progress is not None:
                progress(shard, shard.schema not in present)
        return created_here, len(by_node[node]) - len(created_here) - len(failures), failures

    created: list[str] = []
    existing, failures = 0, {}
    for node, outcome in ask_nodes(
        by_node, create_missing, patience=timeout, silence=SILENCE
    ).items():
        if isinstance(outcome, Exception):
            failures[node] = error_line(outcome)
        else:
            created += outcome[0]
            existing += outcome[1]
            failures |= outcome[2]
    return Created(tuple(sorted(created)), existing, failures)


def _create_schema(shard: Shard) -> None:
    wrapper = connections[shard.alias]
    assert isinstance(wrapper, ShardConnectionMixin)
    wrapper.create_shard_database()
