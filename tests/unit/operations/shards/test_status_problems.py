"""Problems of a fleet's status are told once, not once for each shard."""

from __future__ import annotations

from sharded_orm import runtime
from sharded_orm.operations.shards.fleet_status import (
    FleetStatus,
    GroupOnNode,
    NodeStatus,
    ShardStatus,
)

NODE = "local_1"


def problems(
    *errors: str | None, unexpected: tuple[str, ...] = (), group: str = "photos"
) -> list[str]:
    """Return the problems of shards with these ``errors``, numbered from 0."""
    shards = tuple(
        ShardStatus(runtime.shard(group, number), "error" if error else "current", error=error)
        for number, error in enumerate(errors)
    )
    on_node = GroupOnNode(group, shards, unexpected)
    return FleetStatus((NodeStatus(NODE, None, {group: len(shards)}, (on_node,)),)).problems


def test_one_shard_that_cannot_be_read() -> None:
    [problem] = problems(None, "disk I/O error")
    assert problem == (
        f"Shard 'photos_00001' on '{NODE}' cannot be read (disk I/O error). Look at it with"
        " 'manage.py shards sql photos_00001'."
    )


def test_shards_with_the_same_error_are_one_problem() -> None:
    [problem] = problems(None, *["no such table: x"] * 7)
    assert problem == (
        f"7 shards of 'photos' on '{NODE}' cannot be read: photos_00001, photos_00002, photos_00003,"
        " photos_00004, photos_00005 and 2 more (no such table: x). Look at the first with"
        " 'manage.py shards sql photos_00001'."
    )


def test_errors_that_differ_in_the_name_of_the_shard_are_the_same() -> None:
    shards = [runtime.shard("photos", number) for number in range(3)]
    [problem] = problems(*(f"{shard.alias}: {shard.schema!r} is denied" for shard in shards))
    assert "3 shards" in problem
    assert f"(photos_00000: {shards[0].schema!r} is denied)" in problem


def test_other_errors_are_told_separately() -> None:
    told = problems("full", "locked", "full", "locked", "gone")
    assert ["full" in told[0], "locked" in told[1], "gone" in told[2]] == [True] * 3
    assert "2 shards of 'photos'" in told[0]
    assert "photos_00000, photos_00002" in told[0]


def test_schemas_of_shards_of_another_node_are_one_problem() -> None:
    group = runtime.group("photos")
    elsewhere = [s for s in group.shards() if s.node != NODE]
    [problem] = problems(unexpected=tuple(shard.schema for shard in elsewhere))
    assert f"{len(elsewhere)} schemas do not belong on node '{NODE}'" in problem
    assert repr(elsewhere[0].schema) in problem
    assert f"these shards of 'photos' are on '{elsewhere[0].node}'" in problem
    [problem] = problems(unexpected=(elsewhere[0].schema,))
    assert f"Schema {elsewhere[0].schema!r} does not belong on node '{NODE}': shard" in problem


def test_schemas_of_no_shard_are_another_problem() -> None:
    group = runtime.group("photos")
    there = next(shard for shard in group.shards() if shard.node != NODE).schema
    beyond = tuple(group.schema_name(number) for number in (600, 601))
    told = problems(unexpected=(there, *beyond))
    assert len(told) == 2
    assert f"2 schemas do not belong on node '{NODE}'" in told[1]
    assert "group 'photos' has no such shards" in told[1]
