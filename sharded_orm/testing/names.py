"""The names of a group's schemas while tests run, and topologies with these names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from django.db.backends.base.creation import TEST_DATABASE_PREFIX

from sharded_orm.runtime import TEMPLATE_SUFFIX
from sharded_orm.topology.model import Shard, ShardGroup, Topology

# The template has no number of a shard, so no key is placed on it.
TEMPLATE_NUMBER = -1


@dataclass(frozen=True)
class TestNames:
    """The names of one group's test schemas in one process.

    :param base: the user's ``TEST["NAME"]``, or empty.
    :param folder: the folder of SQLite files; empty for that of the node.
    :param worker: the number of the parallel test process; empty in the main process.
    """

    __test__ = False

    group: str
    base: str = ""
    folder: str = ""
    worker: str = ""

    def for_worker(self, worker: str) -> TestNames:
        return replace(self, worker=worker)

    def to_settings(self) -> dict[str, str]:
        """Return the fields for the settings of the group's alias, which a spawned process reads."""
        return asdict(self)

    def _path(self, name: str) -> str:
        return f"{self.folder}/{name}" if self.folder else name

    def database_name(self, configured: ShardGroup) -> str:
        """Return the pattern of schema names, as in ``DATABASE_NAME``."""
        name = (
            f"{self.base}_{{shard:05d}}"
            if self.base
            else f"{TEST_DATABASE_PREFIX}{configured.database_name}"
        )
        worker = f"_{self.worker}" if self.worker else ""
        folder = self._path("").replace("{", "{{").replace("}", "}}")
        return f"{folder}{name}{worker}"

    def renamed(self, configured: ShardGroup) -> ShardGroup:
        """Return the group with test schemas and without replicas.

        Test schemas are not replicated, so replicas would have no rows.
        """
        return replace(
            configured,
            database_name=self.database_name(configured),
            ranges=tuple(replace(r, replica=None) for r in configured.ranges),
        )

    def template(self, configured: ShardGroup) -> Shard:
        """Return the template: the schema that is migrated, and that all workers read."""
        name = f"{self.base or TEST_DATABASE_PREFIX + self.group}{TEMPLATE_SUFFIX}"
        return Shard(
            self.group, TEMPLATE_NUMBER, configured.ranges[0].primary, None, self._path(name)
        )


@dataclass(frozen=True)
class TestTopology(Topology):
    """A topology in which some groups have test schemas, and templates have aliases."""

    __test__ = False

    templates: Mapping[str, Shard] | None = None

    def resolve(self, alias: str) -> Shard | None:
        if self.templates is not None and alias in self.templates:
            return self.templates[alias]
        return super().resolve(alias)


def with_test_group(topology: Topology, configured: ShardGroup, names: TestNames) -> TestTopology:
    """Return ``topology`` with the test schemas of one more group."""
    return _rebuilt(
        topology,
        {**topology.groups, configured.name: names.renamed(configured)},
        {**_templates(topology), configured.name + TEMPLATE_SUFFIX: names.template(configured)},
    )


def without_test_group(topology: Topology, configured: ShardGroup) -> TestTopology | None:
    """Return ``topology`` with the configured group; None if no group has test schemas any more."""
    templates = _templates(topology)
    templates.pop(configured.name + TEMPLATE_SUFFIX, None)
    if not templates:
        return None
    return _rebuilt(topology, {**topology.groups, configured.name: configured}, templates)


def _templates(topology: Topology) -> dict[str, Shard]:
    return dict(getattr(topology, "templates", None) or {})


def _rebuilt(topology: Topology, groups: Mapping[str, ShardGroup], templates: Any) -> TestTopology:
    return TestTopology(topology.nodes, groups, topology.version, templates)
