"""The keys that people type, as values of the shard key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.core.validators import MinValueValidator
from django.db import connections, models

from sharded_orm.operations.key_input import typed_key
from sharded_orm.topology.aliases import complete
from tests.photos.models import Save


@pytest.fixture
def on_mysql() -> Iterator[str]:
    """A database on MySQL, beside a default one on SQLite; nothing connects to it."""
    pytest.importorskip("MySQLdb")
    connections.settings["on_mysql"] = complete({"ENGINE": "django.db.backends.mysql"})
    try:
        yield "on_mysql"
    finally:
        if hasattr(connections._connections, "on_mysql"):
            del connections["on_mysql"]
        del connections.settings["on_mysql"]


@pytest.mark.parametrize(
    ("field", "text", "said"),
    [
        (
            models.IntegerField(),
            "2147483648",
            "its column holds numbers from -2147483648 to 2147483647",
        ),
        (models.PositiveIntegerField(), "4294967296", "to 4294967295"),
        (models.SmallIntegerField(), "-32769", "from -32768"),
        (models.BigIntegerField(), str(2**63), "9223372036854775807"),
        (models.BigAutoField(primary_key=True), str(2**63), "9223372036854775807"),
        (
            models.BigIntegerField(validators=[MinValueValidator(1)]),
            "0",
            "greater than or equal to 1",
        ),
        (models.CharField(max_length=3), "four", "at most 3 characters"),
        (models.DecimalField(max_digits=3, decimal_places=0), "1000", "no more than 3 digits"),
        (models.DecimalField(max_digits=3, decimal_places=0), "NaN", ""),
        (models.BinaryField(), "\u00e9", "inary"),
        (models.UUIDField(), "x", "is not a valid UUID"),
        (Save._meta.get_field("board"), str(2**63), "9223372036854775807"),
    ],
)
def test_what_no_row_can_have(on_mysql: str, field: Any, text: str, said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        typed_key(field, text, on_mysql)
    assert said in " ".join(caught.value.messages)


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        (models.IntegerField(), "2147483647", 2147483647),
        (models.PositiveIntegerField(), "4294967295", 4294967295),
        (models.BigIntegerField(), "-5", -5),
        (models.CharField(max_length=3), "", ""),
        (Save._meta.get_field("board"), "7", 7),
    ],
)
def test_what_a_row_can_have(on_mysql: str, field: Any, text: str, value: Any) -> None:
    assert typed_key(field, text, on_mysql) == value
