"""Every interleaving of a move with a statement for both of its shards: what counts as exact is exact."""

from __future__ import annotations

from itertools import product

import pytest

from sharded_orm.routing.placement_lease import KeyInFlight, MoveList
from sharded_orm.routing.scattered_keys import is_exact, keys_to_leave_out

SOURCE, TARGET = 3, 12
#: The phase of the move at each moment, and the shards that have the rows of the key; None before the
#: announcement.
DONE = [
    (None, {SOURCE}),
    ("announced", {SOURCE}),
    ("copying", {SOURCE}),
    ("switching", {SOURCE}),
    ("switching", {SOURCE, TARGET}),
    ("switched", {SOURCE, TARGET}),
    ("switched", {TARGET}),
    ("settled", {TARGET}),
]
GIVEN_UP = [
    *DONE[:5],
    ("aborted", {SOURCE, TARGET}),
    ("aborted", {SOURCE}),
    ("aborted", {SOURCE}),
]
LIVES = {"done": DONE, "given up": GIVEN_UP}
every_life = pytest.mark.parametrize("life", LIVES.values(), ids=LIVES)


def moves(
    life: list[tuple[str | None, set[int]]], moment: int, since: int | None = None
) -> MoveList:
    """Return the answer of the directory. The move is in flight until the last moment."""
    phase, _ = life[moment]
    if phase is None:
        return MoveList((), 6)
    move = KeyInFlight("g", "k", "k", 7, SOURCE, TARGET, phase)
    if moment < len(life) - 1:
        return MoveList((move,), 7)
    return MoveList((), 7, (move,) if since is not None and since < 7 else ())


def is_seen_once(
    life: list[tuple[str | None, set[int]]], start: int, used: int, reads: dict[int, int]
) -> bool:
    hidden = keys_to_leave_out("g", moves(life, used), [moves(life, start)])
    return (
        sum(shard in life[moment][1] and shard not in hidden for shard, moment in reads.items())
        == 1
    )


@every_life
def test_what_counts_as_exact_has_seen_the_rows_once(
    life: list[tuple[str | None, set[int]]],
) -> None:
    exact = 0
    for start, used, source, target, end in product(range(len(life)), repeat=5):
        if not start <= min(used, source, target) <= max(used, source, target) <= end:
            continue
        first = moves(life, start)
        after = moves(life, end, since=first.last)
        if is_exact("g", first, moves(life, used), after):
            exact += 1
            reads = {SOURCE: source, TARGET: target}
            assert is_seen_once(life, start, used, reads), (start, used, reads, end)
    assert exact > len(life)


@every_life
def test_the_snapshot_of_one_shard_is_compared_for_that_shard(
    life: list[tuple[str | None, set[int]]],
) -> None:
    """A transaction has a snapshot of one shard, and the other is read after the question."""
    for shard, other in ((SOURCE, TARGET), (TARGET, SOURCE)):
        for start, used, snapshot, read, end in product(range(len(life)), repeat=5):
            if not start <= snapshot <= used <= read <= end:
                continue
            first, known = moves(life, start), moves(life, used)
            after = moves(life, end, since=first.last)
            if is_exact("g", first, known, after, shard) and is_exact("g", known, known, after):
                reads = {shard: snapshot, other: read}
                assert is_seen_once(life, start, used, reads), (shard, start, used, reads, end)


@every_life
def test_while_the_phase_stays_the_statement_is_exact(
    life: list[tuple[str | None, set[int]]],
) -> None:
    for moment in range(len(life)):
        known = moves(life, moment)
        assert is_exact("g", known, known, moves(life, moment, since=known.last))


def test_moves_of_other_groups_do_not_matter() -> None:
    nothing, after = moves(DONE, 0), moves(DONE, 5)
    assert is_exact("other", nothing, nothing, after)
    assert not is_exact("g", nothing, nothing, after)
    assert keys_to_leave_out("other", after, []) == {}


def test_a_write_hides_announced_keys_on_their_targets() -> None:
    known = moves(DONE, 1)
    assert keys_to_leave_out("g", known, []) == {}
    assert keys_to_leave_out("g", known, [], announced=True) == {TARGET: known.in_flight}
