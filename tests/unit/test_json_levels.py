"""The levels of values that are stored as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sharded_orm.json_levels import MAX_LEVELS, has_too_many_levels


def _lists(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def _dicts(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": 1, "b": value}
    return value


def _tuples(levels: int) -> Any:
    value: Any = ()
    for _ in range(levels - 1):
        value = (value, 1)
    return value


@pytest.mark.parametrize("nested", [_lists, _dicts, _tuples])
def test_levels_are_counted_without_the_dict_of_all_values(nested: Any) -> None:
    def is_refused(values: Any) -> bool:
        return has_too_many_levels(values, json.dumps(values))

    assert not is_refused({"a": 1, "b": nested(MAX_LEVELS)})
    assert is_refused({"a": 1, "b": nested(MAX_LEVELS + 1)})
    assert is_refused({"a": nested(MAX_LEVELS + 1), "b": []})


def test_brackets_that_are_no_levels_are_not_counted() -> None:
    values = {"text": "[" * 1_000, "many": [[]] * 1_000}
    assert not has_too_many_levels(values, json.dumps(values))
