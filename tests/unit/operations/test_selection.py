"""Selections of shards: by group, number and node; nothing is selected by mistake."""

from __future__ import annotations

import pytest

from sharded_orm import runtime
from sharded_orm.operations.exceptions import InvalidSelection
from sharded_orm.operations.selection import numbers_text, parse_numbers, select


def found(*arguments: object) -> dict[str, str]:
    return {
        each.group.name: numbers_text(each.shards)
        for each in select(*arguments)  # type: ignore[arg-type]  # as the tests pass them
    }


def test_all_shards_by_default() -> None:
    counts = {name: group.count for name, group in runtime.topology().groups.items()}
    assert found() == {name: f"0-{count - 1}" for name, count in counts.items()}


def test_numbers_may_overlap_and_come_in_any_order() -> None:
    assert found("photos", parse_numbers("9,3-5, 4-7,0")) == {"photos": "0,3-7,9"}


def test_a_node_selects_what_it_is_the_primary_of() -> None:
    node = runtime.shard("photos", 8).node
    assert found("photos", None, node) == {"photos": "8-15"}
    assert found(None, None, node)["events"] == "4-7"
    assert found("photos", [range(6, 10)], node) == {"photos": "8-9"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("photo",), r"There is no group 'photo'; choose from \['archive'"),
        (("photos", [range(14, 17)]), "Group 'photos' has no shard 16: its shards are 0 to 15"),
        ((None, [range(1)]), "--shards needs --group"),
        ((None, None, "db9"), "There is no node 'db9'; choose from"),
    ],
)
def test_what_does_not_exist_is_named(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(InvalidSelection, match=message):
        found(*arguments)


def test_nothing_is_an_error() -> None:
    node = runtime.shard("photos", 8).node
    with pytest.raises(InvalidSelection, match="No shard is selected"):
        found("photos", [range(2)], node)


@pytest.mark.parametrize(
    "text", ["", "1,", "a", "3-1", "-1", "1-", "1.5", "²", "٣", "9" * 5000, f"0-{'9' * 5000}"]
)
def test_text_that_is_no_numbers(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number or a range"):
        parse_numbers(text)
