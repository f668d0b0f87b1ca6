"""Django's schema editor for PostgreSQL. It tells the connection object how many editors are open."""

from __future__ import annotations

from django.db.backends.postgresql import schema

from sharded_orm.backends.schema import EditorMixin


class DatabaseSchemaEditor(EditorMixin, schema.DatabaseSchemaEditor):
    pass
