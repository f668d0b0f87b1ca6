"""Django's operations, with our compilers."""

from __future__ import annotations

from django.db.backends.sqlite3 import operations

from sharded_orm.backends.write_hooks.compilers import FlushMixin


class DatabaseOperations(FlushMixin, operations.DatabaseOperations):
    """Writes and flushes tell of themselves."""

    compiler_module = "sharded_orm.backends.sqlite3.compiler"
