"""Checks of single values, for all parts of the ``SHARDED_ORM`` setting.

The parameter ``where`` of each function is the name of the part of the setting. Each error message
begins with that name. A wrong value is replaced by a default, so the other checks can go on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any


def unknown_keys(where: str, values: Mapping[Any, Any], valid: set[str]) -> Iterator[str]:
    """Yield a message for each key of ``values`` that is not in ``valid``."""
    for key in values:
        if key not in valid:
            yield f"{where}unknown key {key!r}; valid keys are {sorted(valid)!r}"


def seconds(
    where: str, key: str, values: Mapping[Any, Any], default: float, problems: list[str]
) -> float:
    """Return the number of seconds in ``values[key]``; ``default`` if the key is missing.

    If the value is not a positive number, add a sentence to ``problems`` and return ``default``.
    """
    value = values.get(key, default)
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value > 0
    ):
        return value
    problems.append(f"{where}{key} must be a positive number of seconds, not {value!r}")
    return default


def flag(
    where: str, key: str, values: Mapping[Any, Any], default: bool, problems: list[str]
) -> bool:
    """Return the bool in ``values[key]``; ``default`` if the key is missing.

    If the value is not a bool, add a sentence to ``problems`` and return ``default``.
    """
    # Refuse all values but True and False: the text "no", for example, would count as true.
    value = values.get(key, default)
    if not isinstance(value, bool):
        problems.append(f"{where}{key} must be True or False, not {value!r}")
        return default
    return value
