"""Django's schema editor, for connections that lease a session only when they need one."""

from __future__ import annotations

from typing import Any

from django.db.backends.mysql import schema

from sharded_orm.backends.schema import EditorMixin


class DatabaseSchemaEditor(EditorMixin, schema.DatabaseSchemaEditor):
    def quote_value(self, value: Any) -> Any:
        # Django's method assumes that a session is open. Here, a session may have to be opened first,
        # and the driver may then raise an error.
        with self.connection.wrap_database_errors:
            return super().quote_value(value)
