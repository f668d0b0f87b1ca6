"""The shard that a schema name belongs to, or would belong to."""

from __future__ import annotations

import pytest

from sharded_orm.operations.shards.fleet_status import number_parser
from sharded_orm.topology.model import ShardGroup


@pytest.mark.parametrize(
    ("template", "schema", "number"),
    [
        ("{group}_{shard:05d}", "photos_00042", 42),
        ("{group}_{shard:05d}", "photos_123456", 123456),
        ("{group}_{shard:05d}", "photos_042", None),
        ("{group}_{shard:05d}", "photos_00042_rehearsal", None),
        ("{group}_{shard:05d}", "test_photos_00042", None),
        ("{group}_{shard:05d}", "photosx00042", None),
        ("{group}_{shard:05d}", "albums_00042", None),
        ("db{shard}", "db42", 42),
        ("db{shard}", "db042", None),
        ("a.b{{x}}{shard:03d}", "a.b{x}007", 7),
        ("a.b{{x}}{shard:03d}", "a-b{x}007", None),
        ("{shard:03d}_{shard:03d}", "007_007", 7),
        ("{shard:03d}_{shard:03d}", "007_008", None),
        # These cannot be told apart from names of others.
        ("db{shard:x}", "db1a", None),
        ("db{shard:x}", "db10", None),
    ],
)
def test_numbers(template: str, schema: str, number: int | None) -> None:
    group = ShardGroup("photos", (), "modulo", database_name=template)
    assert number_parser(group)(schema) == number
