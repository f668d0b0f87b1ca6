"""Schema drift: shards whose tables differ from those of their siblings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from django.db import DatabaseError, connections

from sharded_orm.backends.group.member import ShardConnectionMixin
from sharded_orm.backends.snapshot import SchemaSnapshot
from sharded_orm.operations.nodes import Alive
from sharded_orm.operations.shards.status import ShardStatus, error_line
from sharded_orm.scatter.failures import is_node_gone
from sharded_orm.topology.model import Shard


@dataclass(frozen=True)
class Drift:
    """A shard whose schema is not that of its siblings in the same state of migrations.

    :param sibling: one of those that it differs from, the larger part of them.
    :param differences: what is different, in sentences.
    """

    shard: Shard
    sibling: Shard
    siblings: int
    differences: tuple[str, ...]


@dataclass
class _SchemaVariant:
    """The shards of one group and state whose schemas are equal."""

    snapshot: SchemaSnapshot
    shards: list[Shard] = field(default_factory=list)


@dataclass
class Schemas:
    """What shards look like, each distinct schema once. Belongs to one thread; see :meth:`add`."""

    #: (group, digest of migrations) -> fingerprint -> those that look so.
    variants: dict[tuple[str, str], dict[str, _SchemaVariant]] = field(default_factory=dict)
    #: Alias -> why its schema could not be read.
    errors: dict[str, str] = field(default_factory=dict)

    def read(self, shards: Iterable[ShardStatus], alive: Alive) -> None:
        """Read the schema of each shard; two round trips each, on MySQL."""
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
            finally:
                wrapper.close()
            alive()

    def add(self, other: Schemas) -> None:
        """Take over what was read of another node."""
        for key, variants in other.variants.items():
            for variant in variants.values():
                for shard in variant.shards:
                    self._add_shard(shard, key[1], variant.snapshot)
        self.errors.update(other.errors)

    def _add_shard(self, shard: Shard, digest: str, snapshot: SchemaSnapshot) -> None:
        variants = self.variants.setdefault((shard.group, digest), {})
        variants.setdefault(snapshot.fingerprint, _SchemaVariant(snapshot)).shards.append(shard)

    def drifts(self) -> list[Drift]:
        """The shards that do not look as most of their siblings do, in order."""
        drifts = []
        for variants in self.variants.values():
            # Of as many on both sides, those with the first shard are taken for right.
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
