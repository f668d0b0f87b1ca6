"""Django's serializer for XML, which looks up natural keys as :mod:`.natural_keys` says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.core.serializers import xml_serializer

from sharded_orm.models.relations.natural_keys import alias_of_look_ups

__all__ = ["Deserializer", "Serializer"]

Serializer = xml_serializer.Serializer


class Deserializer(xml_serializer.Deserializer):
    def _handle_fk_field_node(self, node: Any, field: Any) -> Any:
        return self._looked_up(super()._handle_fk_field_node, node, field)  # type: ignore[misc]  # not in the stubs

    def _handle_m2m_field_node(self, node: Any, field: Any) -> Any:
        return self._looked_up(super()._handle_m2m_field_node, node, field)  # type: ignore[misc]  # not in the stubs

    def _looked_up(self, handle: Callable[[Any, Any], Any], node: Any, field: Any) -> Any:
        alias: Any = self.db
        self.db = alias_of_look_ups(field.remote_field.model, alias)  # type: ignore[assignment]  # None lets the key decide
        try:
            return handle(node, field)
        finally:
            self.db = alias
