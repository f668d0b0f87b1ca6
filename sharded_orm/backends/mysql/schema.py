"""Django's schema editor, for connections that lease a session only when they need one."""

from __future__ import annotations

from typing import Any

from django.db.backends.mysql import schema

from sharded_orm.backends.schema import KEEP_DEFAULTS, EditorMixin


class DatabaseSchemaEditor(EditorMixin, schema.DatabaseSchemaEditor):
    def quote_value(self, value: Any) -> Any:
        # Convert the driver's errors to Django's. Django's own method does not, because it assumes
        # an open session. Here it may have to lease a session, which may fail.
        with self.connection.wrap_database_errors:
            return super().quote_value(value)

    def skip_default_on_alter(self, field: Any) -> bool:
        # If this method returns True, the default of a new column stays in the database. Otherwise
        # Django drops it after it has added the column.
        keeps = bool(self.connection.settings_dict.get(KEEP_DEFAULTS))
        return keeps or bool(super().skip_default_on_alter(field))
