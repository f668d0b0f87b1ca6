"""Django's schema editor, which counts itself on its connection while it is open."""

from __future__ import annotations

from django.db.backends.sqlite3 import schema

from sharded_orm.backends.schema import EditorMixin


class DatabaseSchemaEditor(EditorMixin, schema.DatabaseSchemaEditor):
    """As Django's."""
