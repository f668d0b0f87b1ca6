"""Prevents MariaDB and MySQL from changing rounded floats, as of ``ROUND()``, in a UNION."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from django.db.models import FloatField, Func, Max, Min

from sharded_orm.scatter.comparison import has_field
from sharded_orm.scatter.refusals import parts_of

# SQL functions whose float results have a fixed number of decimal places in these databases.
_ROUNDING: Final = frozenset(["ROUND", "CEIL", "CEILING", "FLOOR", "TRUNCATE"])


def widened(selected: Iterable[Any]) -> list[Any]:
    """Return the entries of a SELECT clause, with each rounded float multiplied by 1.

    In MariaDB and MySQL, the type of a rounded float has a fixed number of decimal places. A column
    of a UNION with this type has room for only 17 digits, so the server changes 3e17 to 1e17,
    without an error. The multiplication keeps the value, but its result has an ordinary float type.

    :param selected: entries as in ``SQLCompiler.select``: (expression, (SQL, parameters), alias).
    """
    return [
        (expression, (f"({sql}) * 1e0", params), alias)
        if expression is not None and _is_rounded_float(expression)
        else (expression, (sql, params), alias)
        for expression, (sql, params), alias in selected
    ]


def _is_rounded_float(expression: Any) -> bool:
    if not (has_field(expression) and isinstance(expression.output_field, FloatField)):
        return False
    if getattr(expression, "contains_aggregate", False) and not isinstance(expression, Max | Min):
        return False  # The merge computes it from exact parts.
    return any(
        isinstance(part, Func)
        and str(part.extra.get("function", part.function)).upper() in _ROUNDING
        for part in parts_of(expression)
    )
