"""The column with the body of an object."""

from __future__ import annotations

from django.db import connection

from sharded_orm.contrib.objects.body_column import BodyColumn


def test_a_text_that_python_cannot_read_is_left_as_it_is() -> None:
    text = '{"tags": ' + "[" * 10**5 + "]" * 10**5 + "}"
    assert BodyColumn().from_db_value(text, None, connection) == text
