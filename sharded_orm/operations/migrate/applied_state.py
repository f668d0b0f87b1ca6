"""Find out which shards have migrations to run.

This needs only one query for many shards of a node (database server).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from django.db import Error, connections
from django.db.migrations.exceptions import InconsistentMigrationHistory

from sharded_orm.exceptions import ShardedOrmError
from sharded_orm.operations.exceptions import InvalidMigrationTarget
from sharded_orm.operations.migrate.migration_records import Records
from sharded_orm.operations.migrate.plan import MigrationPlan
from sharded_orm.operations.migrate.planner import Planner
from sharded_orm.topology.model import Shard

# Errors that mean that a server does not answer, or that its answer cannot be used.
_SERVER_ERRORS = (Error, ShardedOrmError, OSError)


@dataclass
class AppliedState:
    """How far the examined shards are migrated.

    Shards with the same applied migrations need the same plan. They have the same *digest*, a short
    text that is computed from the applied migrations. The digest of a shard without the table
    ``django_migrations`` is "". Shards that are up to date are only counted, and take no memory.
    """

    #: Number of shards that are up to date: they have no migration to run, and no squashed
    #: migration to record as applied.
    current: int = 0
    #: Shards that exist and are not up to date: they have migrations to run, or squashed migrations
    #: to record as applied.
    behind: list[Shard] = field(default_factory=list)
    #: Shards whose database (MySQL schema or SQLite file) does not exist.
    missing: list[Shard] = field(default_factory=list)
    #: The errors of the shards whose state could not be read, keyed by the alias of the shard.
    unreachable: dict[str, Exception] = field(default_factory=dict)
    #: Maps the digest of a shard to the migrations to run there. A migration is a tuple (app label,
    #: migration name, whether it runs backwards).
    plans: dict[str, list[tuple[str, str, bool]]] = field(default_factory=dict)
    #: Maps each digest to the number of shards with it. Shards whose database does not exist have
    #: the digest "".
    count: dict[str, int] = field(default_factory=dict)


def applied_state(planner: Planner, shards: Iterable[Shard]) -> AppliedState:
    """Return how far ``shards`` are migrated.

    The database computes a digest of each shard's applied migrations: one query reads the digests
    of up to 500 shards of a node. Shards with the same digest have applied the same migrations. So
    one plan is made for each digest, with the migrations of one of these shards.

    :raises InvalidMigrationTarget: the target does not exist, or no path leads to it.
    """
    state = AppliedState()
    nodes: dict[str, list[Shard]] = {}
    for shard in shards:
        nodes.setdefault(shard.node, []).append(shard)
    plans: dict[str, MigrationPlan] = {}
    for members in nodes.values():
        for shard, digest in _digests(members, state):
            digest_key = digest or ""  # The digest is None if the shard does not exist.
            if digest_key not in plans:
                plan = _plan(planner, shard, digest_key, state)
                if plan is None:
                    continue
                plans[digest_key] = plan
                state.plans[digest_key] = [(*unit.key, unit.backwards) for unit in plan.units]
            state.count[digest_key] = state.count.get(digest_key, 0) + 1
            if digest is None:
                state.missing.append(shard)
            elif plans[digest_key].is_empty:
                state.current += 1
            else:
                state.behind.append(shard)
    return state


def _digests(shards: Sequence[Shard], state: AppliedState) -> Iterator[tuple[Shard, str | None]]:
    connection: Any = connections[shards[0].alias]
    try:
        digests = connection.applied_digests(shards)
    except _SERVER_ERRORS as exc:
        if len(shards) > 1 and _answers(connection):
            # One broken shard makes the query fail for all shards, although the server works. Find
            # that shard: query each half of the shards separately, then each half of a half, and so
            # on.
            half = len(shards) // 2
            yield from _digests(shards[:half], state)
            yield from _digests(shards[half:], state)
        else:
            state.unreachable.update({shard.alias: exc for shard in shards})
        return
    for shard in shards:
        yield shard, digests[shard.alias]


def _answers(connection: Any) -> bool:
    try:
        connection.schemas_present()
    except _SERVER_ERRORS:
        return False
    return True


def _plan(planner: Planner, shard: Shard, digest: str, state: AppliedState) -> MigrationPlan | None:
    connection = connections[shard.alias]
    try:
        return planner.plan(connection, Records(shard.alias).applied() if digest else frozenset())
    except Error as exc:
        state.unreachable[shard.alias] = exc
        return None
    except InvalidMigrationTarget as exc:
        if not isinstance(exc.__cause__, InconsistentMigrationHistory):
            raise
        # The migration history of this shard is inconsistent. Count only this shard as unreachable,
        # because the history of other shards may be consistent.
        state.unreachable[shard.alias] = exc
        return None
    finally:
        connection.close()
