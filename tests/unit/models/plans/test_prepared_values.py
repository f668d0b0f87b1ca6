"""Which values of a save need no preparation by their field."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from django.db import connection, models

from sharded_orm.models.plans.prepared_values import is_sent_unchanged, only_adapts_datetimes


class OwnTime(models.DateTimeField):  # type: ignore[type-arg]  # generic in the stubs only
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


def test_datetimes_of_djangos_field_are_only_adapted() -> None:
    assert only_adapts_datetimes(models.DateTimeField())
    assert only_adapts_datetimes(models.DateTimeField(auto_now=True))
    assert only_adapts_datetimes(OwnTime())
    for other in (models.DateField(), models.TimeField(), models.CharField(), models.JSONField()):
        assert not only_adapts_datetimes(other)


@pytest.mark.parametrize(
    "name", ["get_db_prep_save", "get_db_prep_value", "get_prep_value", "to_python"]
)
@pytest.mark.parametrize("place", ["class", "object"])
def test_a_field_with_a_method_of_its_own_prepares_them(name: str, place: str) -> None:
    def method(self: Any, value: datetime, *args: Any, **kwargs: Any) -> Any:
        return value.replace(microsecond=0)

    field: Any = OwnTime()
    if place == "class":
        field = type("Rounded", (OwnTime,), {name: method})()
    else:
        setattr(field, name, method.__get__(field))
    assert not only_adapts_datetimes(field)


def test_a_method_that_djangos_methods_call_by_super_prepares_them() -> None:
    class Changed(models.Field):  # type: ignore[type-arg]  # generic in the stubs only
        def get_prep_value(self, value: Any) -> Any:
            return f"changed {super().get_prep_value(value)}"

    class ChangedTime(models.DateTimeField, Changed):  # type: ignore[type-arg]
        pass

    class ChangedText(models.TextField, Changed):  # type: ignore[type-arg]
        pass

    assert ChangedText().get_prep_value("text") == "changed text"
    assert not only_adapts_datetimes(ChangedTime())
    assert is_sent_unchanged(models.TextField(), str, connection)
    assert not is_sent_unchanged(ChangedText(), str, connection)
