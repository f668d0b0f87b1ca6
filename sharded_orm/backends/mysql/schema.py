"""Django's schema editor on connections that lease sessions of a node."""

from __future__ import annotations

from typing import Any

from django.db.backends.mysql import schema

from sharded_orm.backends.schema import EditorMixin


class DatabaseSchemaEditor(EditorMixin, schema.DatabaseSchemaEditor):
    def quote_value(self, value: Any) -> Any:
        # Django's method takes it for granted that a session is open; ours may have to open one.
        with self.connection.wrap_database_errors:
            return super().quote_value(value)
