"""Checks of single values, shared by all parts of the ``SHARDED_ORM`` setting.

A check adds a sentence about what is wrong to a list of problems, and returns a valid value to
go on with. The sentence begins with ``where``, the part of the setting that is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any


def unknown_keys(where: str, values: Mapping[Any, Any], valid: set[str]) -> Iterator[str]:
    """One problem for each key of ``values`` that is not ``valid``."""
    for key in values:
        if key not in valid:
            yield f"{where}unknown key {key!r}; valid keys are {sorted(valid)!r}"


def seconds(
    where: str, key: str, values: Mapping[Any, Any], default: float, problems: list[str]
) -> float:
    """The positive number of seconds under ``key``; ``default`` if there is none."""
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
    """True or False under ``key``; ``default`` if there is neither."""
    # Nothing else counts as true: "no" would.
    value = values.get(key, default)
    if not isinstance(value, bool):
        problems.append(f"{where}{key} must be True or False, not {value!r}")
        return default
    return value
