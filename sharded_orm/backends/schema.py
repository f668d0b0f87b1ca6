"""A mixin for schema editors, which makes visible whether a migration runs on a connection."""

from __future__ import annotations

from typing import Any, Final, Self

from django.db.backends.base.schema import BaseDatabaseSchemaEditor

#: A key in the settings of an alias. If its value is true, migrations of the alias leave the
#: default of a new column in the database. Otherwise Django drops the default after it has added
#: the column, because its own INSERTs name all columns.
KEEP_DEFAULTS: Final = "KEEP_COLUMN_DEFAULTS"


class EditorMixin(BaseDatabaseSchemaEditor):
    """Counts how many schema editors of a connection are open, in ``connection.open_editors``.
    While this number is not 0, a migration runs on the connection.

    The ``DatabaseSchemaEditor`` of each backend has this class as its first base class.
    """

    connection: Any

    def __enter__(self) -> Self:
        super().__enter__()
        self.connection.open_editors += 1
        return self

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        # Stop counting this editor before Django's method commits the transaction. The commit calls
        # the functions of transaction.on_commit(), which are no part of the migration.
        self.connection.open_editors -= 1
        super().__exit__(exc_type, exc_value, traceback)

    def execute(self, sql: Any, params: Any = ()) -> None:
        # Count this editor during each statement. At its end, __exit__() executes the statements of
        # ``deferred_sql``. They are part of the migration, but the editor is not counted any more.
        self.connection.open_editors += 1
        try:
            super().execute(sql, params)
        finally:
            self.connection.open_editors -= 1
