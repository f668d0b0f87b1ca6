"""Migration operations that fail when a test sets an error."""

from __future__ import annotations

from typing import Any

from django.db import transaction

#: Raised by the operations below, in the middle of their work.
error: BaseException | None = None


class Broken(BaseException):
    """Like a kill: no code handles it."""


def insert(apps: Any, schema_editor: Any) -> None:
    """Insert a row before the failure and a row after it."""
    albums = apps.get_model("fleet", "Album").objects.using(schema_editor.connection.alias)
    albums.create(user_id=1, name="before")
    if error is not None:
        raise error
    albums.create(user_id=1, name="after")


def alter(apps: Any, schema_editor: Any) -> None:
    """Insert rows after a statement that commits by itself on MySQL."""
    with schema_editor.connection.cursor() as cursor:
        cursor.execute("ALTER TABLE fleet_album ADD COLUMN extra integer NULL")
    insert(apps, schema_editor)


def alter_by_procedure(apps: Any, schema_editor: Any) -> None:
    """Insert rows after a procedure ``widen``, which commits by itself on MySQL."""
    with schema_editor.connection.cursor() as cursor:
        cursor.callproc("widen")
    insert(apps, schema_editor)


def alter_by_driver(apps: Any, schema_editor: Any) -> None:
    """Insert rows after a statement of the driver's connection, which commits by itself on MySQL."""
    schema_editor.connection.connection.query(
        b"ALTER TABLE fleet_album ADD COLUMN extra integer NULL"
    )
    insert(apps, schema_editor)


def alter_by_cursor_of_driver(apps: Any, schema_editor: Any) -> None:
    """Insert rows after a statement of a cursor that is not Django's."""
    cursor = schema_editor.connection.connection.cursor()
    cursor.execute("ALTER TABLE fleet_album ADD COLUMN extra integer NULL")
    cursor.close()
    insert(apps, schema_editor)


def lose(apps: Any, schema_editor: Any) -> None:
    """Insert rows; the session is then killed in the middle of a statement."""
    connection = schema_editor.connection
    insert(apps, schema_editor)
    with connection.cursor() as cursor:
        cursor.execute("KILL CONNECTION_ID()")


def alter_within_default(apps: Any, schema_editor: Any) -> None:
    """Run :func:`alter` in a transaction of the global database, as a plain ``atomic()`` does."""
    with transaction.atomic():
        alter(apps, schema_editor)


def run(*statements: str) -> Any:
    """Return an operation's function that runs these statements."""

    def forwards(apps: Any, schema_editor: Any) -> None:
        with schema_editor.connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)

    return forwards
