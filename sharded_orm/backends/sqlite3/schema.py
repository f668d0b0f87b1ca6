"""Django's schema editor, which tells that it is open."""

from __future__ import annotations

from django.db.backends.sqlite3 import schema

from sharded_orm.backends.schema import EditorMixin


class DatabaseSchemaEditor(EditorMixin, schema.DatabaseSchemaEditor):
    """As Django's."""
