from __future__ import annotations

from sharded_orm.backends.postgresql.statement_text import without_comments


def test_comments_are_removed_and_literals_are_not() -> None:
    sql = "-- a\nCREATE EXTENSION \"x-y\" VERSION '1--2'; /* b /* c */ */ "
    assert without_comments(sql) == "CREATE EXTENSION \"x-y\" VERSION '1--2'"
