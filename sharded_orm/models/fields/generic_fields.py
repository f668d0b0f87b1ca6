"""The base classes of the library's id fields.

At run time, they are Django's ``BigAutoField`` and ``BigIntegerField``. For mypy, they are these
classes with type arguments: the types of the values that can be assigned and read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.db import models

if TYPE_CHECKING:
    from django.db.models.expressions import Combinable

    BigAutoField = models.BigAutoField[int | str | Combinable, int]
    BigIntegerField = models.BigIntegerField[int | str | Combinable, int]
else:
    # At run time, Django's field classes are not generic, so they cannot be subscripted.
    BigAutoField, BigIntegerField = models.BigAutoField, models.BigIntegerField
