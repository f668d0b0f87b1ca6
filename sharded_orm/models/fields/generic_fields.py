"""Django's fields for ids, with the types of their values, which the fields of the library inherit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.db import models

if TYPE_CHECKING:
    from django.db.models.expressions import Combinable

    BigAutoField = models.BigAutoField[int | str | Combinable, int]
    BigIntegerField = models.BigIntegerField[int | str | Combinable, int]
else:
    # Fields are not generic at run time.
    BigAutoField, BigIntegerField = models.BigAutoField, models.BigIntegerField
