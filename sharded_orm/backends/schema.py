"""A mixin for schema editors. An attribute of the connection object counts how many editors are
open.
"""

from __future__ import annotations

from typing import Any, Final, Self

from django.db.backends.base.schema import BaseDatabaseSchemaEditor

#: If the settings of a database alias have this key, a new column keeps its default in the database.
#: Without the key, Django drops the default at once, because its own INSERT names all columns.
KEEP_DEFAULTS: Final = "KEEP_COLUMN_DEFAULTS"


class EditorMixin(BaseDatabaseSchemaEditor):
    """First base class of a backend's ``DatabaseSchemaEditor``.

    ``connection.open_editors`` is the number of open editors. A migration is running if that number
    is not 0.
    """

    connection: Any

    def __enter__(self) -> Self:
        super().__enter__()
        self.connection.open_editors += 1
        return self

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        self.connection.open_editors -= 1
        super().__exit__(exc_type, exc_value, traceback)
