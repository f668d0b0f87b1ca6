"""Each strategy: the shard of a key, refused keys, remembered keys."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from sharded_orm.exceptions import (
    InvalidConfiguration,
    InvalidShardKey,
    NoOpenShard,
    NoReachableShard,
)
from sharded_orm.routing.base import make_strategy
from sharded_orm.routing.directory import DirectoryStrategy, StoredPlacement
from sharded_orm.routing.embedded import EmbeddedStrategy
from sharded_orm.routing.placement_lease import MoveList, PlacementLease
from sharded_orm.routing.range import RangeStrategy
from sharded_orm.topology.model import ShardGroup, ShardRange


def strategy(name: str, count: int = 4096, ranges: Any = None, **options: Any) -> Any:
    spread = tuple(ranges or [ShardRange(0, count - 1, "a")])
    return make_strategy(ShardGroup("g", spread, name, options))


def test_modulo_of_the_published_examples() -> None:
    assert strategy("modulo", 2000).locate(31341) == 1341  # I4
    assert strategy("modulo").locate("1.2.3.4") == 1537  # P11
    assert strategy("modulo").locate(0) == 0
    assert strategy("modulo", 7).locate(-1) == 6


def test_modulo_takes_uuids_bytes_and_unicode_and_refuses_the_rest() -> None:
    modulo = strategy("modulo")
    assert modulo.locate(uuid.UUID(int=5)) == modulo.locate(uuid.UUID(int=5).bytes)
    assert 0 <= modulo.locate("žluťoučký kůň") < 4096
    for wrong in (1.5, None, object()):
        with pytest.raises(InvalidShardKey, match="modulo"):
            modulo.locate(wrong)


@pytest.mark.parametrize("name", ["modulo", "directory"])
def test_text_that_no_database_stores_is_no_key(name: str) -> None:
    with pytest.raises(InvalidShardKey, match="UTF-8"):
        strategy(name).locate("\ud800")


@pytest.mark.parametrize(
    ("made", "kinds"),
    [
        (("modulo", {}), {int, str}),
        (("directory", {}), {int, str}),
        (("embedded", {}), {int}),
        (("range", {"SIZE": 10}), {int}),
        (("range", {"BOUNDS": [-5, 0, 5, 10]}), {int}),
        (("range", {"BOUNDS": [0.5, 1, 2.5, 3]}), {int}),
        (("range", {"BOUNDS": ["a", "b", "c", "d"]}), {str}),
        (("range", {"BOUNDS": [b"a", b"b", b"c", b"d"]}), set()),
    ],
)
def test_the_types_that_a_strategy_can_place(
    made: tuple[str, dict[str, Any]], kinds: set[type]
) -> None:
    name, options = made
    one = strategy(name, 4, **options)
    assert {kind for kind in (int, str) if one.accepts(kind)} == kinds
    for kind, key in ((int, 7), (str, "b")):
        if name != "directory" and kind not in kinds:
            with pytest.raises(InvalidShardKey):
                one.locate(key)


@pytest.mark.parametrize(
    ("base", "name", "options"),
    [(EmbeddedStrategy, "embedded", {}), (RangeStrategy, "range", {"SIZE": 10})],
)
def test_a_strategy_that_converts_keys_may_place_other_types(
    base: type[Any], name: str, options: dict[str, Any]
) -> None:
    class FromText(base):  # type: ignore[misc]  # the base class is computed
        def locate(self, key: Any) -> int | None:
            located: int | None = super().locate(int(key))
            return located

    made = FromText(strategy(name, 4, **options).group, options)
    assert made.locate("7") == made.locate(7)
    assert made.accepts(str)


def test_range_by_bounds() -> None:
    by_bounds = strategy("range", 3, BOUNDS=["a", "h", "p"])
    assert [by_bounds.locate(k) for k in ("a", "gz", "h", "zebra")] == [0, 0, 1, 2]
    assert by_bounds.locate("A") is None
    with pytest.raises(InvalidShardKey, match="'a' up to no upper end"):
        by_bounds.place("A")
    with pytest.raises(InvalidShardKey):
        by_bounds.locate(5)


def test_range_by_size() -> None:
    by_size = strategy("range", 4, SIZE=1000)
    assert [by_size.locate(k) for k in (0, 999, 1000, 3999)] == [0, 0, 1, 3]
    for outside in (-1, 4000):
        assert by_size.locate(outside) is None
        with pytest.raises(InvalidShardKey, match="0 up to 4000"):
            by_size.place(outside)
        assert "up to 4000" in by_size.explain(outside)


@pytest.mark.parametrize(
    "keys",
    [
        [],
        [0, 1, 5 << 46, 5 << 46 | 9, 0],
        [5 << 46, 15 << 46, 16 << 46],
        [3 << 46, -1],
        [3 << 46, 1 << 63],
        [3 << 46, 1 << 80],
    ],
)
def test_embedded_locates_many_keys_as_one(keys: list[int]) -> None:
    embedded = strategy("embedded", 16)
    assert embedded.locate_many(keys) == {key: embedded.locate(key) for key in keys}
    for wrong in (True, "1", None, 1.0):
        with pytest.raises(InvalidShardKey):
            embedded.locate_many([*keys, wrong])


def test_many_keys_are_located_as_one_by_a_strategy_of_the_project() -> None:
    class Mirrored(EmbeddedStrategy):
        def locate(self, key: Any) -> int | None:
            return 15 - (super().locate(key) or 0)

    mirrored = Mirrored(strategy("embedded", 16).group, {})
    assert mirrored.locate_many([0, 5 << 46]) == {0: 15, 5 << 46: 10}


def test_embedded_reads_the_published_id() -> None:
    assert strategy("embedded").locate(241294492511762325) == 3429  # P1
    assert strategy("embedded", 8, SHIFT=10, BITS=13).locate(5 << 10 | 3) == 5
    for wrong in ("5", True):
        with pytest.raises(InvalidShardKey):
            strategy("embedded").locate(wrong)
    for nobodys in (-1, 1 << 63, 4096 << 46):
        assert strategy("embedded").locate(nobodys) is None
        with pytest.raises(InvalidShardKey, match=str(nobodys)):
            strategy("embedded").place(nobodys)
        assert str(nobodys) in strategy("embedded").explain(nobodys)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("modulo", {"X": 1}, "unknown strategy option 'X'"),
        ("range", {}, "BOUNDS or SIZE"),
        ("range", {"SIZE": 0}, "positive number"),
        ("range", {"SIZE": True}, "positive number"),
        ("range", {"BOUNDS": [3, 2, 1, 0]}, "ascending"),
        ("range", {"BOUNDS": 5}, "ascending"),
        ("range", {"BOUNDS": [1, "a", 2, 3]}, "ascending"),
        ("embedded", {"SHIFT": 60}, "63 bits"),
        ("embedded", {"BITS": 1}, "do not fit"),
        ("directory", {"CACHE_SIZE": -1}, "0 or more"),
        ("no.such.Thing", {}, "cannot be imported"),
        ("collections.Counter", {}, "not a Strategy class"),
    ],
)
def test_wrong_options(name: str, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidConfiguration, match=expected):
        strategy(name, 4, **options)


class MemoryStore:
    """A directory in memory that counts its queries."""

    def __init__(self, committed: bool = True) -> None:
        self.rows: dict[str, int] = {}
        self.queries = 0
        self.committed = committed

    def find(self, group: str, keys: Iterable[str]) -> dict[str, StoredPlacement]:
        self.queries += 1
        return {k: StoredPlacement(self.rows[k], self.committed) for k in keys if k in self.rows}

    def moves(self, since: int | None = None) -> MoveList:
        return MoveList((), 0)

    def place(self, group: str, placements: Mapping[str, int]) -> dict[str, StoredPlacement]:
        for key, number in placements.items():
            self.rows.setdefault(key, number)
        return self.find(group, placements)


def directory(store: MemoryStore, ranges: Any = None, **options: Any) -> DirectoryStrategy:
    made = strategy("directory", 16, ranges, **options)
    assert isinstance(made, DirectoryStrategy)
    made.store = store
    made.lease = PlacementLease(store, 5.0)
    return made


def test_directory_reads_place_nothing_and_remember_nothing() -> None:
    store = MemoryStore()
    found = directory(store)
    assert found.locate(7) is None
    assert found.locate_many([7, 8]) == {7: None, 8: None}
    assert (store.rows, store.queries) == ({}, 2)
    assert found.locate(7) is None and store.queries == 3


def test_directory_places_once_and_remembers() -> None:
    store = MemoryStore()
    first = directory(store)
    number = first.place(7)
    asked = store.queries
    assert [first.place(7), first.locate(7)] == [number, number]
    assert store.queries == asked
    assert directory(store).place(7) == number


def test_directory_the_first_placement_wins() -> None:
    store = MemoryStore()
    mine, store_place = directory(store), store.place

    def overtaken(group: str, placements: Mapping[str, int]) -> dict[str, StoredPlacement]:
        store.rows.setdefault("7", 15)
        return store_place(group, placements)

    store.place = overtaken  # type: ignore[method-assign]
    assert mine.place(7) == 15


def test_directory_does_not_remember_what_may_be_rolled_back() -> None:
    store = MemoryStore(committed=False)
    found = directory(store)
    found.place(7)
    store.rows.clear()
    assert found.locate(7) is None


def test_directory_memory_is_bounded() -> None:
    found = directory(MemoryStore(), CACHE_SIZE=10)
    found.place_many(range(100))
    assert len(found._placements) == 10


def test_directory_keys_are_told_apart_exactly() -> None:
    store = MemoryStore()
    found = directory(store)
    keys = ["alice", "Alice", "alice ", "álice", "x" * 300, "x" * 301, 5, "five"]
    found.place_many(keys)
    assert len(store.rows) == len(keys)
    assert all(len(key) <= 65 for key in store.rows)
    for wrong in (1.5, True, b"x"):
        with pytest.raises(InvalidShardKey):
            found.locate(wrong)


def test_directory_draws_open_shards_by_weight() -> None:
    ranges = [
        ShardRange(0, 3, "a", open=False),
        ShardRange(4, 7, "a", weight=3),
        ShardRange(8, 15, "a", weight=0.5),
    ]
    drawn = Counter(
        n > 7 for n in directory(MemoryStore(), ranges).place_many(range(4000)).values()
    )
    # 4 shards of weight 3 against 8 of weight 0.5: three to one.
    assert 2700 < drawn[False] < 3300
    closed = [ShardRange(0, 15, "a", open=False)]
    with pytest.raises(NoOpenShard):
        directory(MemoryStore(), closed).place(1)


def test_the_share_of_a_node_that_is_down_goes_to_the_others_by_weight() -> None:
    ranges = [
        ShardRange(0, 3, "a", weight=100),
        ShardRange(4, 7, "b", weight=3),
        ShardRange(8, 15, "c", weight=0.5),
        ShardRange(16, 19, "a"),
    ]
    by_node = directory(MemoryStore(), ranges)
    by_node.node_failure = lambda shard: OSError("no route") if shard.node == "a" else None
    drawn = Counter(by_node.group.shard(n).node for n in by_node.place_many(range(4000)).values())
    assert set(drawn) == {"b", "c"}
    assert 2700 < drawn["b"] < 3300
    by_node.node_failure = lambda shard: OSError(f"no route to {shard.node}")
    with pytest.raises(
        NoReachableShard, match=r"'a': no route to a; .*'c': no route to c"
    ) as caught:
        by_node.place(-1)
    assert set(caught.value.causes) == {"a", "b", "c"}
    assert by_node.locate(-1) is None
