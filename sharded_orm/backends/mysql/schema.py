"""Django's schema editor on connections that belong to nodes."""

from __future__ import annotations

from typing import Any

from django.db.backends.mysql import schema

from sharded_orm.backends.schema import EditorMixin


class DatabaseSchemaEditor(EditorMixin, schema.DatabaseSchemaEditor):
    """Quotes by a session of the node, which may have to be opened for it."""

    def quote_value(self, value: Any) -> Any:
        # Django's method takes the driver's connection for one that is open.
        with self.connection.wrap_database_errors:
            return super().quote_value(value)
