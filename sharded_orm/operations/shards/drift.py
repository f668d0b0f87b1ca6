"""Find schema drift: shards whose tables differ although they have the same applied migrations.

The usual cause is that somebody has changed a table of one shard by hand.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from django.db import DatabaseError, connections

from sharded_orm.backends.group.member import ShardConnectionMixin
from sharded_orm.backends.snapshot import SchemaSnapshot
from sharded_orm.operations.nodes import Alive
from sharded_orm.operations.shards.fleet_status import ShardStatus
from sharded_orm.operations.shards.foreign_ids import ForeignIDs, foreign_ids
from sharded_orm.operations.shards.status import error_line
from sharded_orm.scatter.failures import is_node_gone
from sharded_orm.topology.model import Shard


@dataclass(frozen=True)
class Drift:
    """A shard whose schema differs from the most common schema among its siblings.

    The siblings are the shards of the same group with the same applied migrations. They should all
    have equal schemas.

    :param sibling: one of the siblings with the most common schema.
    :param siblings: number of siblings with the most common schema.
    :param differences: one sentence for each difference.
    """

    shard: Shard
    sibling: Shard
    siblings: int
    differences: tuple[str, ...]


@dataclass
class _SchemaVariant:
    """One version of the schema of a group, and the shards that have it."""

    snapshot: SchemaSnapshot
    shards: list[Shard] = field(default_factory=list)


@dataclass
class Schemas:
    """The schemas (table definitions) of shards, to be compared. Equal schemas are stored once.

    Not thread-safe: use a separate instance in each thread, and merge the instances with
    :meth:`add`.
    """

    #: The different schemas that were found. The key is a pair: the name of a group, and a digest,
    #: that is, a short text that identifies the applied migrations. All shards with the same pair
    #: should have equal schemas. The inner dict maps the fingerprint (a hash) of each different
    #: schema to the schema and its shards.
    variants: dict[tuple[str, str], dict[str, _SchemaVariant]] = field(default_factory=dict)
    #: Database functions and counters that would make ids that belong to another shard.
    foreign_ids: list[ForeignIDs] = field(default_factory=list)
    #: Maps the alias of a shard to the reason why its schema could not be read.
    errors: dict[str, str] = field(default_factory=dict)

    def read(self, shards: Iterable[ShardStatus], alive: Alive) -> None:
        """Read the schemas of ``shards`` into this object.

        On MySQL, each schema costs two round trips.

        :param alive: called after each shard, to report that the node answers.
        """
        for shard_status in shards:
            wrapper = connections[shard_status.shard.alias]
            assert isinstance(wrapper, ShardConnectionMixin)
            try:
                snapshot = wrapper.schema_snapshot()
            except DatabaseError as exc:
                if is_node_gone(exc):
                    raise
                self.errors[shard_status.shard.alias] = error_line(exc)
            else:
                self._add_shard(shard_status.shard, shard_status.digest or "", snapshot)
                self.foreign_ids += foreign_ids(shard_status.shard, snapshot)
            finally:
                wrapper.close()
            alive()

    def add(self, other: Schemas) -> None:
        """Add to this object what ``other`` has read from another node."""
        for key, variants in other.variants.items():
            for variant in variants.values():
                for shard in variant.shards:
                    self._add_shard(shard, key[1], variant.snapshot)
        self.foreign_ids += other.foreign_ids
        self.errors.update(other.errors)

    def _add_shard(self, shard: Shard, digest: str, snapshot: SchemaSnapshot) -> None:
        variants = self.variants.setdefault((shard.group, digest), {})
        variants.setdefault(snapshot.fingerprint, _SchemaVariant(snapshot)).shards.append(shard)

    def drifts(self) -> list[Drift]:
        """Return the shards whose schema differs from the most common schema, sorted by alias."""
        drifts = []
        for variants in self.variants.values():
            # The schema that most shards have counts as the right one. If two schemas have equally
            # many shards, it is the one whose first shard has the lowest number.
            majority, *others = sorted(
                variants.values(),
                key=lambda variant: (-len(variant.shards), variant.shards[0].number),
            )
            for variant in others:
                differences = tuple(variant.snapshot.differences(majority.snapshot))
                drifts += [
                    Drift(shard, majority.shards[0], len(majority.shards), differences)
                    for shard in variant.shards
                ]
        return sorted(drifts, key=lambda drift: drift.shard.alias)
