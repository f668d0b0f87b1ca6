"""Django's schema editor for SQLite. The connection object counts how many editors are open."""

from __future__ import annotations

from django.db.backends.sqlite3 import schema

from sharded_orm.backends.schema import EditorMixin


class DatabaseSchemaEditor(EditorMixin, schema.DatabaseSchemaEditor):
    """Django's schema editor, counted in ``connection.open_editors`` while it is open."""
