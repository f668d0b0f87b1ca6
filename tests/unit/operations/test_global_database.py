"""The remedy for a global database that refuses writes fits the server."""

from __future__ import annotations

import pytest
from django.db import InternalError, OperationalError
from psycopg.errors import ReadOnlySqlTransaction

from sharded_orm.operations.runs import global_database


@pytest.mark.parametrize(
    ("error", "cause", "remedy"),
    [
        (OperationalError(1290, "read-only"), None, "SET GLOBAL read_only = OFF"),
        (InternalError("read-only"), ReadOnlySqlTransaction(), "pg_promote()"),
    ],
)
def test_the_remedy_is_that_of_the_server(
    error: Exception, cause: Exception | None, remedy: str
) -> None:
    error.__cause__ = cause
    global_database.explain(error)  # type: ignore[arg-type]  # one of Django's errors
    (note,) = error.__notes__
    assert remedy in note
    assert ("SET GLOBAL" in note) == (cause is None)


@pytest.mark.django_db
def test_a_refused_write_of_the_journal_is_explained() -> None:
    with pytest.raises(InternalError) as caught, global_database.require_journal():
        raise InternalError("read-only") from ReadOnlySqlTransaction()
    assert "pg_promote()" in caught.value.__notes__[0]
