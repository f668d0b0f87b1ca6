"""The topology in the settings themselves, which changes by a deploy."""

from __future__ import annotations

from typing import ClassVar

from sharded_orm.topology.document import Document
from sharded_orm.topology.sources.base import TopologySource


class StaticSource(TopologySource):
    """The ``NODES`` and ``GROUPS`` of the settings; the default source."""

    live: ClassVar[bool] = False

    def describe(self) -> str:
        return "SHARDED_ORM in the settings"

    def load(self) -> Document:
        """The settings as a document of version 0, without credentials."""
        nodes, groups = (self.setting.get(key, {}) for key in ("NODES", "GROUPS"))
        return Document(0, nodes, groups).without_credentials()
