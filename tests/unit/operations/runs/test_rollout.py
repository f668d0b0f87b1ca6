"""Waves: which shard is next, how many at once, and when no other starts."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharded_orm.operations.exceptions import InvalidWaves
from sharded_orm.operations.runs.rollout import Stopping, Waves, work_through
from sharded_orm.topology.model import Shard
from tests.patience import PATIENCE


def shards(**counts: int) -> list[Shard]:
    """Return that many shards on each node, numbered through."""
    nodes = [node for node, count in counts.items() for _ in range(count)]
    return [
        Shard("shop", number, node, None, f"shop_{number:05d}") for number, node in enumerate(nodes)
    ]


def numbers(waves: Waves, several: list[Shard]) -> list[list[int]]:
    return [[shard.number for shard in wave] for wave in waves.cut(several)]


def test_nodes_take_turns() -> None:
    assert numbers(Waves(canary=0), shards(a=3, b=2)) == [[0, 3, 1, 4, 2]]


def test_the_canary_is_a_wave_of_its_own() -> None:
    assert numbers(Waves(canary=2, size=2), shards(a=3, b=2)) == [[0, 3], [1, 4], [2]]
    assert numbers(Waves(canary=9), shards(a=1, b=1)) == [[0, 1]]
    assert numbers(Waves(), []) == []


@given(
    canary=st.integers(0, 5),
    size=st.none() | st.integers(1, 5),
    counts=st.dictionaries(st.sampled_from("abc"), st.integers(1, 9)),
)
def test_each_shard_is_in_one_wave(canary: int, size: int | None, counts: dict[str, int]) -> None:
    several = shards(**counts)
    cut = numbers(Waves(canary=canary, size=size), several)
    assert sorted(number for wave in cut for number in wave) == list(range(len(several)))
    assert all(cut)


@pytest.mark.parametrize(
    "wrong",
    [{"canary": -1}, {"parallel": 0}, {"size": 0}, {"pause": -0.1}, {"max_failures": -1}],
    ids=str,
)
def test_numbers_that_make_no_sense(wrong: dict[str, float]) -> None:
    (name,) = wrong
    with pytest.raises(InvalidWaves, match=f"{name} must be at least"):
        Waves(**wrong)  # type: ignore[arg-type]  # for right types as well, the values are wrong


def test_so_many_of_each_node_at_once_and_no_more() -> None:
    """All that may run at once meet; one more, or one fewer, breaks the barrier."""
    meeting = threading.Barrier(2 + 2, timeout=PATIENCE)
    running: Counter[str] = Counter()
    most: Counter[str] = Counter()
    lock = threading.Lock()

    def work(shard: Shard) -> bool:
        with lock:
            running[shard.node] += 1
            most[shard.node] = max(most[shard.node], running[shard.node])
        meeting.wait()
        with lock:
            running[shard.node] -= 1
        # No other shard starts before all of these have left.
        meeting.wait()
        return True

    work_through(shards(a=6, b=6), work, Waves(canary=0, parallel=2), Stopping())
    assert most == {"a": 2, "b": 2}


def test_a_failed_canary_stops_the_others() -> None:
    done: list[int] = []
    stopping = Stopping()

    def work(shard: Shard) -> bool:
        done.append(shard.number)
        return False

    work_through(shards(a=3, b=3), work, Waves(canary=2), stopping)
    assert sorted(done) == [0, 3]
    assert stopping.cause == "the canary failed"


def test_a_shard_alone_is_no_canary() -> None:
    stopping = Stopping()
    work_through(shards(a=1), lambda shard: False, Waves(), stopping)
    assert stopping.cause == ""


def test_without_a_canary_failures_are_counted() -> None:
    done: list[int] = []
    stopping = Stopping()

    def work(shard: Shard) -> bool:
        done.append(shard.number)
        return False

    work_through(shards(a=9), work, Waves(canary=0, parallel=1, max_failures=2), stopping)
    assert done == [0, 1, 2]
    assert stopping.cause == "more than 2 shards failed"


def test_what_is_raised_ends_everything() -> None:
    begun: list[int] = []

    def work(shard: Shard) -> bool:
        begun.append(shard.number)
        raise RuntimeError(f"on {shard.number}")

    stopping = Stopping()
    with pytest.raises(RuntimeError, match="on 0"):
        work_through(shards(a=9), work, Waves(canary=0, parallel=1), stopping)
    assert begun == [0]
    assert stopping()


def test_a_pause_ends_when_it_is_stopped() -> None:
    stopping = Stopping()
    done: list[int] = []

    def work(shard: Shard) -> bool:
        done.append(shard.number)
        threading.Timer(0.05, stopping.stop, ["stopped by a test"]).start()
        return True

    # The test would last an hour otherwise.
    work_through(shards(a=2), work, Waves(pause=3600), stopping)
    assert done == [0]
