"""The names of a shard group's schemas while tests run, and topologies that use these names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from django.db.backends.base.creation import TEST_DATABASE_PREFIX

from sharded_orm.database_settings import TEMPLATE_SUFFIX
from sharded_orm.topology.model import Shard, ShardGroup, Topology

# The number of the template, the schema that is migrated. No shard has this number, so no query can
# reach the template by mistake.
TEMPLATE_NUMBER = -1


@dataclass(frozen=True)
class TestNames:
    """The names of one shard group's test schemas in one process.

    :param group: name of the shard group.
    :param base: the user's ``TEST["NAME"]``; "" if it is not set.
    :param folder: folder for SQLite files; "" for the folder of the node.
    :param worker: number of the worker process of a parallel test run; "" in the main process.
    """

    __test__ = False

    group: str
    base: str = ""
    folder: str = ""
    worker: str = ""

    def for_worker(self, worker: str) -> TestNames:
        return replace(self, worker=worker)

    def to_settings(self) -> dict[str, str]:
        """Return the fields as a dict, which is stored in the settings of the group's alias.

        A worker process that was spawned, and not forked, reads the names there.
        """
        return asdict(self)

    def _path(self, name: str) -> str:
        return f"{self.folder}/{name}" if self.folder else name

    def database_name(self, configured: ShardGroup) -> str:
        """Return the pattern for the names of the test schemas, in the format of the setting
        ``DATABASE_NAME``.

        :param configured: the group as in the settings of the project.
        """
        name = (
            f"{self.base}_{{shard:05d}}"
            if self.base
            else f"{TEST_DATABASE_PREFIX}{configured.database_name}"
        )
        worker = f"_{self.worker}" if self.worker else ""
        folder = self._path("").replace("{", "{{").replace("}", "}}")
        return f"{folder}{name}{worker}"

    def renamed(self, configured: ShardGroup) -> ShardGroup:
        """Return a copy of a group with test schemas and without replicas.

        Test schemas are not replicated, so their replicas would have no rows.

        :param configured: the group as in the settings of the project.
        """
        return replace(
            configured,
            database_name=self.database_name(configured),
            ranges=tuple(replace(r, replica=None) for r in configured.ranges),
        )

    def template(self, configured: ShardGroup) -> Shard:
        """Return the template as a ``Shard`` object.

        The template is the only schema that is migrated. All worker processes clone their test shards
        from it.

        :param configured: the group as in the settings of the project.
        """
        name = f"{self.base or TEST_DATABASE_PREFIX + self.group}{TEMPLATE_SUFFIX}"
        return Shard(
            self.group, TEMPLATE_NUMBER, configured.ranges[0].primary, None, self._path(name)
        )


@dataclass(frozen=True)
class TestTopology(Topology):
    """A topology that contains the test shards of some groups, and can find templates by alias.

    A template is the schema that is migrated, and from which the test shards of a group are cloned.

    :param templates: maps the alias of each template to the template.
    """

    __test__ = False

    templates: Mapping[str, Shard] | None = None

    def resolve(self, alias: str) -> Shard | None:
        if self.templates is not None and alias in self.templates:
            return self.templates[alias]
        return super().resolve(alias)


def with_test_group(topology: Topology, configured: ShardGroup, names: TestNames) -> TestTopology:
    """Return a copy of ``topology`` in which the group ``configured`` uses its test schemas.

    :param configured: the group, as in the settings of the project.
    :param names: the names of the group's test schemas.
    """
    return _rebuilt(
        topology,
        {**topology.groups, configured.name: names.renamed(configured)},
        {**_templates(topology), configured.name + TEMPLATE_SUFFIX: names.template(configured)},
    )


def without_test_group(topology: Topology, configured: ShardGroup) -> TestTopology | None:
    """Return a copy of ``topology`` in which the group ``configured`` uses its real schemas again.

    Return None if no other group uses test schemas; in this case, the topology of the settings can
    be used.

    :param configured: the group, as in the settings of the project.
    """
    templates = _templates(topology)
    templates.pop(configured.name + TEMPLATE_SUFFIX, None)
    if not templates:
        return None
    return _rebuilt(topology, {**topology.groups, configured.name: configured}, templates)


def _templates(topology: Topology) -> dict[str, Shard]:
    return dict(getattr(topology, "templates", None) or {})


def _rebuilt(topology: Topology, groups: Mapping[str, ShardGroup], templates: Any) -> TestTopology:
    return TestTopology(topology.nodes, groups, topology.version, templates)
