"""Values that fields of properties take, and those that they refuse."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.db import models

from sharded_orm.contrib.entities.exceptions import InvalidProperty
from sharded_orm.contrib.entities.properties import clean, encode
from sharded_orm.models.fields import ExactCharField

_FIELDS: tuple[models.Field[Any, Any], ...] = (
    models.BooleanField(),
    models.DateField(),
    models.DateTimeField(),
    models.BigIntegerField(),
    models.UUIDField(),
    ExactCharField(max_length=5),
)


class Broken:
    """A value that can be neither compared nor shown."""

    def __eq__(self, other: object) -> bool:
        raise ZeroDivisionError

    __hash__ = None  # type: ignore[assignment]  # as a class with __eq__ has

    def __str__(self) -> str:
        raise ZeroDivisionError

    __repr__ = __str__


@pytest.mark.parametrize("field", _FIELDS, ids=lambda field: type(field).__name__)
@pytest.mark.parametrize(
    "value",
    [Decimal("sNaN"), Decimal("NaN"), Decimal("Infinity"), -(10**6000), complex(1, 2), Broken()],
    ids=["sNaN", "NaN", "Infinity", "6000 digits", "complex", "broken"],
)
def test_a_value_of_another_kind_is_refused_by_each_field(
    field: models.Field[Any, Any], value: Any
) -> None:
    with pytest.raises(InvalidProperty, match="property value=") as refusal:
        clean({"value": field}, {"value": value})
    assert len(str(refusal.value)) < 500


@pytest.mark.parametrize(
    "value", [Decimal("sNaN"), -(10**6000), Broken()], ids=["sNaN", "6000", "broken"]
)
def test_a_value_that_json_does_not_have_is_refused_without_a_field(value: Any) -> None:
    with pytest.raises(InvalidProperty, match="'value'"):
        encode({}, {"value": value})


def test_a_message_of_a_validator_is_cut_off_or_left_out() -> None:
    def refuse(value: Any) -> None:
        raise ValidationError("%(value)s is refused", params={"value": value})

    for field, value in (
        (models.BigIntegerField(validators=[refuse]), 10**6000),
        (ExactCharField(max_length=5, validators=[refuse]), "a" * 6000),
    ):
        with pytest.raises(InvalidProperty, match="property value=") as refusal:
            clean({"value": field}, {"value": value})
        assert len(str(refusal.value)) < 500
