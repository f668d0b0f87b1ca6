"""Django's schema editor for PostgreSQL, with a count of the open editors."""

from __future__ import annotations

from django.db.backends.postgresql import schema

from sharded_orm.backends.schema import EditorMixin


class DatabaseSchemaEditor(EditorMixin, schema.DatabaseSchemaEditor):
    pass
