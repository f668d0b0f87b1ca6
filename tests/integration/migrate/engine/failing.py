"""Operations of migrations that fail when a test says so."""

from __future__ import annotations

from typing import Any

from django.db import transaction

#: Raised by the operations below, in the middle of what they do.
error: BaseException | None = None


class Broken(BaseException):
    """As a kill, nobody expects it."""


def insert(apps: Any, schema_editor: Any) -> None:
    """A row before the place where it may fail, and a row after it."""
    albums = apps.get_model("fleet", "Album").objects.using(schema_editor.connection.alias)
    albums.create(user_id=1, name="before")
    if error is not None:
        raise error
    albums.create(user_id=1, name="after")


def alter(apps: Any, schema_editor: Any) -> None:
    """The same, with a statement that commits by itself on MySQL."""
    with schema_editor.connection.cursor() as cursor:
        cursor.execute("ALTER TABLE fleet_album ADD COLUMN extra integer NULL")
    insert(apps, schema_editor)


def lose(apps: Any, schema_editor: Any) -> None:
    """A row, and then its session is killed in the middle of a statement."""
    connection = schema_editor.connection
    insert(apps, schema_editor)
    with connection.cursor() as cursor:
        cursor.execute("KILL CONNECTION_ID()")


def alter_within_default(apps: Any, schema_editor: Any) -> None:
    """The same, in a transaction of the global database, as ``atomic()`` without an alias is."""
    with transaction.atomic():
        alter(apps, schema_editor)
