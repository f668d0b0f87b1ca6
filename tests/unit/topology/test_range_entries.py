"""The two forms of an entry of RANGES, and shards that leave their range."""

from __future__ import annotations

from typing import Any

from sharded_orm.topology.document import Document
from sharded_orm.topology.range_entries import entry_of, primary_of, replace_shard, replica_of

PAIR = {"pair": ["a", "b"], "active": "b", "weight": 2}


def content(*ranges: dict[str, Any]) -> dict[str, Any]:
    return {"groups": {"photos": {"RANGES": list(ranges)}}}


def test_both_forms_have_a_primary_and_a_replica() -> None:
    assert [(primary_of(entry), replica_of(entry)) for entry in (
        PAIR, {"primary": "a", "replica": "b"}, {"primary": "a"}
    )] == [("b", "a"), ("a", "b"), ("a", None)]  # fmt: skip


def test_a_shard_changes_its_side_and_comes_back() -> None:
    whole = content({"range": [0, 9], **PAIR})
    changed = content({"range": [0, 9], **PAIR})
    replace_shard(changed, "photos", 4, {**PAIR, "active": "a"})
    assert changed == content(
        {"range": [0, 3], **PAIR},
        {"range": [4, 4], **PAIR, "active": "a"},
        {"range": [5, 9], **PAIR},
    )
    entry = entry_of(changed, "photos", 4)
    assert entry is not None
    replace_shard(changed, "photos", 4, {**entry, "active": "b"})
    assert changed == whole


def test_the_change_of_a_side_is_told() -> None:
    before, after = (
        Document.from_content({"format": 1, "version": 1, "nodes": {}, **content({"range": [0, 9], **entry})})
        for entry in (PAIR, {**PAIR, "active": "a"})
    )  # fmt: skip
    assert before.differences(after) == [
        "group 'photos': range [0, 9]: active 'b' becomes 'a'",
    ]
