"""The topology source for a topology in Django's settings, which changes only with a deployment."""

from __future__ import annotations

from typing import ClassVar

from sharded_orm.topology.document import Document
from sharded_orm.topology.sources.base import TopologySource


class StaticSource(TopologySource):
    """The default topology source: ``NODES`` and ``GROUPS`` of ``SHARDED_ORM`` in the settings."""

    live: ClassVar[bool] = False

    def describe(self) -> str:
        return "SHARDED_ORM in the settings"

    def load(self) -> Document:
        """Return the settings as a document of version 0, without credentials."""
        nodes, groups = (self.setting.get(key, {}) for key in ("NODES", "GROUPS"))
        return Document(0, nodes, groups).without_credentials()
