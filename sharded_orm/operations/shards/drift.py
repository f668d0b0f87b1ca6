"""Schema drift: shards whose tables differ from those of their siblings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from django.db import DatabaseError, connections

from sharded_orm.backends.group.member import ShardConnectionMixin
from sharded_orm.backends.snapshot import SchemaSnapshot
from sharded_orm.operations.nodes import Alive
from sharded_orm.operations.shards.status import ShardStatus, told_by
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
class _Look:
    """The shards of one group and state whose schemas are equal."""

    snapshot: SchemaSnapshot
    shards: list[Shard] = field(default_factory=list)


@dataclass
class Schemas:
    """What shards look like, each distinct schema once. Belongs to one thread; see :meth:`add`."""

    #: (group, digest of migrations) -> fingerprint -> those that look so.
    looks: dict[tuple[str, str], dict[str, _Look]] = field(default_factory=dict)
    #: Alias -> why its schema could not be read.
    errors: dict[str, str] = field(default_factory=dict)

    def read(self, shards: Iterable[ShardStatus], alive: Alive) -> None:
        """Read the schema of each shard; two round trips each, on MySQL."""
        for one in shards:
            wrapper = connections[one.shard.alias]
            assert isinstance(wrapper, ShardConnectionMixin)
            try:
                snapshot = wrapper.schema_snapshot()
            except DatabaseError as exc:
                if is_node_gone(exc):
                    raise
                self.errors[one.shard.alias] = told_by(exc)
            else:
                self._note(one.shard, one.digest or "", snapshot)
            finally:
                wrapper.close()
            alive()

    def add(self, other: Schemas) -> None:
        """Take over what was read of another node."""
        for key, looks in other.looks.items():
            for look in looks.values():
                for shard in look.shards:
                    self._note(shard, key[1], look.snapshot)
        self.errors.update(other.errors)

    def _note(self, shard: Shard, digest: str, snapshot: SchemaSnapshot) -> None:
        looks = self.looks.setdefault((shard.group, digest), {})
        looks.setdefault(snapshot.fingerprint, _Look(snapshot)).shards.append(shard)

    def drifts(self) -> list[Drift]:
        """The shards that do not look as most of their siblings do, in order."""
        found = []
        for looks in self.looks.values():
            # Of as many on both sides, those with the first shard are taken for right.
            usual, *others = sorted(
                looks.values(), key=lambda look: (-len(look.shards), look.shards[0].number)
            )
            for look in others:
                differences = tuple(look.snapshot.differences(usual.snapshot))
                found += [
                    Drift(shard, usual.shards[0], len(usual.shards), differences)
                    for shard in look.shards
                ]
        return sorted(found, key=lambda one: one.shard.alias)
