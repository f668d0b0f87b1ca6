"""Limits the levels of lists and dicts in values that are stored as JSON.

Python writes, reads and copies such values recursively. So a value that is nested deeply could be
stored, and then not be used by a caller whose own calls are nested deeply.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: The largest number of levels of lists and dicts in a value.
MAX_LEVELS = 100


def has_too_many_levels(values: Mapping[Any, Any], text: str) -> bool:
    """Whether one of ``values`` has more than :data:`MAX_LEVELS` levels. The dict ``values`` is no level.

    :param text: the JSON of ``values``. Its brackets tell most often that there are few levels.
    """
    if text.count("[") + text.count("{") <= MAX_LEVELS:
        return False
    level, depth = _containers(values.values()), 0
    while level and depth <= MAX_LEVELS:
        depth += 1
        level = [
            child
            for each in level
            for child in _containers(each.values() if isinstance(each, dict) else each)
        ]
    return depth > MAX_LEVELS


def _containers(values: Any) -> list[Any]:
    return [value for value in values if isinstance(value, dict | list | tuple)]
