"""Which functions and counters of a schema make ids of another shard."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from sharded_orm import runtime
from sharded_orm.backends.snapshot import SchemaSnapshot
from sharded_orm.ids.layout import PACKED
from sharded_orm.ids.timestamps_postgresql import function_name
from sharded_orm.operations.shards.foreign_ids import foreign_ids

FUNCTION = function_name()
BOARD, NOTE = 1, 4  # their type_id


@pytest.mark.parametrize(
    ("numbers", "counters", "sources"),
    [
        ({FUNCTION: 2}, {"photos_app_board": PACKED.counted(2, BOARD).start}, []),
        ({FUNCTION: 1}, {}, [FUNCTION]),
        ({"sharded_orm_next_id_of_a_field_that_is_gone": 1}, {}, []),
        # All ids of the shard are used up.
        ({}, {"photos_app_board": PACKED.counted(2, BOARD).stop}, []),
        ({}, {"photos_app_board": PACKED.counted(1, BOARD).start}, ["photos_app_board"]),
        ({}, {"photos_app_board": PACKED.counted(3, BOARD).start}, ["photos_app_board"]),
        ({}, {"photos_app_note": PACKED.counted(1, NOTE).start}, ["photos_app_note"]),
        # On PostgreSQL, the counter may be that of the second column of this table.
        ({FUNCTION: 2}, {"photos_app_note": PACKED.counted(1, NOTE).start}, []),
    ],
)
def test_foreign_ids(
    numbers: Mapping[str, int], counters: Mapping[str, int], sources: list[str]
) -> None:
    shard = runtime.group("pins").shard(2)
    snapshot = SchemaSnapshot({}, counters=counters, shard_numbers=numbers)
    assert [each.source for each in foreign_ids(shard, snapshot)] == sources
