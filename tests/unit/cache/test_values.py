"""Values of objects and lists: they come back exactly, or they count as a miss."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import IntEnum
from typing import Any
from uuid import UUID
from zlib import crc32
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharded_orm.cache import values
from sharded_orm.cache.values import BROKEN, MISS, Unusable

FINGERPRINT, STAMP = "0123abcd", "a" * 32
NAMES = [f"photos.Photo-1-{pk}" for pk in range(8)]
OFFSET = timezone(timedelta(hours=5, minutes=30))


def one_fold(value: Any) -> Any:
    """The only times that drivers return have fold 0; others are not stored (below)."""
    return value.replace(fold=0)


# Values of every type that a driver returns; also texts with surrogates, which SQLite has.
field = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(st.characters(), max_size=30),
    st.text('[]{}",\\\n', max_size=8),
    st.binary(max_size=30),
    st.decimals(),
    st.datetimes(timezones=st.none() | st.sampled_from([UTC, OFFSET])).map(one_fold),
    st.dates(),
    st.times(timezones=st.none() | st.just(UTC)).map(one_fold),
    st.timedeltas(),
    st.uuids(),
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if type(a) is not type(b):
        return False
    if isinstance(a, datetime | time) and a.tzinfo != b.tzinfo:
        return False
    return str(a) == str(b) if isinstance(a, float | Decimal) else a == b


def pack(row: Sequence[Any], name: str = NAMES[0], stamp: str = STAMP) -> bytes:
    raw = values.pack_object(name, FINGERPRINT, stamp, row)
    assert raw is not None
    return raw


def unpack(*raws: bytes | None, width: int, names: Sequence[str] = NAMES) -> list[Any]:
    found = values.unpack_objects(raws, names[: len(raws)], FINGERPRINT, STAMP, width)
    return list(found)


def forged(letters: str, body: bytes, name: str = NAMES[0]) -> bytes:
    """An entry in which everything is right but its content."""
    start = f"o1 {FINGERPRINT} {STAMP} {name} ".encode()
    return resigned(start + body + b',"' + letters.encode() + b'"')


def resigned(whole: bytes) -> bytes:
    return whole + crc32(whole).to_bytes(4, "little")


@given(st.integers(1, 6).flatmap(
    lambda width: st.lists(st.tuples(*[field] * width), min_size=1, max_size=5)
))  # fmt: skip
def test_rows_come_back_exactly(rows: list[tuple[Any, ...]]) -> None:
    raws = [pack(row, name) for name, row in zip(NAMES, rows, strict=False)]
    found = unpack(*raws, width=len(rows[0]))
    assert same(found, rows)


@given(st.lists(field, max_size=8))
def test_lists_come_back_exactly(pks: list[Any]) -> None:
    raw = values.pack_list("photos.Photo-list-1-q-r", FINGERPRINT, pks)
    assert raw is not None
    assert same(values.unpack_list(raw, "photos.Photo-list-1-q-r", FINGERPRINT), pks)


class Colour(IntEnum):
    RED = 1


class Name(str):
    pass


@pytest.mark.parametrize("value", [
    [1], (1,), {"a": 1}, object(), 1j, Colour.RED, Name("x"), memoryview(b"x"), {1},
    datetime(2020, 10, 25, 2, 30, fold=1),
    datetime(2020, 1, 1, tzinfo=ZoneInfo("Europe/Prague")),
    10**5000,
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_what_cannot_be_carried_is_not_cached(value: Any) -> None:
    assert values.pack_object(NAMES[0], FINGERPRINT, STAMP, (1, value)) is None
    assert values.pack_list("name", FINGERPRINT, [1, value]) is None


def test_nothing_there_is_a_miss() -> None:
    assert unpack(None, b"", width=1) == [MISS, MISS]
    assert values.unpack_list(None, "name", FINGERPRINT) is MISS
    assert values.unpack_list(b"", "name", FINGERPRINT) is MISS


def test_another_generation_and_another_version_are_misses() -> None:
    other = values.pack_object(NAMES[1], "ffffffff", STAMP, (1, 2, 3))
    newer = pack((1,), NAMES[2]).replace(b"o1 ", b"o2 ", 1)
    assert unpack(pack((1,), stamp="b" * 32), other, newer, width=1) == [MISS, MISS, MISS]
    whole = values.pack_list("name", "ffffffff", [1])
    assert values.unpack_list(whole, "name", FINGERPRINT) is MISS


def test_a_copy_under_another_name_does_not_count() -> None:
    raw = pack((1, "secret"), NAMES[0])
    assert unpack(raw, raw, width=2) == [[1, "secret"], BROKEN]
    assert unpack(raw, width=2, names=[NAMES[0] + "1"]) == [BROKEN]
    assert unpack(raw, width=2, names=[NAMES[0][:-1]]) == [BROKEN]
    some = values.pack_list("one", FINGERPRINT, [1])
    assert values.unpack_list(some, "other", FINGERPRINT) is BROKEN
    assert values.unpack_list(raw, NAMES[0], FINGERPRINT) is BROKEN
    assert unpack(some, width=1, names=["one"]) == [BROKEN]


def test_a_row_of_another_width_does_not_count() -> None:
    assert unpack(pack((1, 2)), width=3) == [BROKEN]
    assert unpack(pack((1, 2)), width=1) == [BROKEN]
    assert unpack(forged("..", b"1"), width=2) == [BROKEN]
    assert unpack(forged("..", b"1,2,3"), width=2) == [BROKEN]


PREFIX = len(f"o1 {FINGERPRINT} {STAMP} {NAMES[0]} ")
GOOD = (7, "fine")

POISON = {
    "random": b"\x00\xff\x13\x37" * 50,
    "no fields": resigned(pack(GOOD)[:PREFIX]),
    "no letters": resigned(pack(GOOD)[:PREFIX] + b"1,2"),
    "a number for letters": resigned(pack(GOOD)[:PREFIX] + b"1,2,3"),
    "more letters": forged("...", b"1,2"),
    "pickle": pickle.dumps(("photos", 1)),
    "cut in the head": pack(GOOD)[:20],
    "cut in the name": pack(GOOD)[:60],
    "cut": pack(GOOD)[:-1],
    "longer": pack(GOOD) + b" ",
    "changed": pack(GOOD).replace(b"fine", b"gone"),
    "nested 100,000 deep": forged("..", b"[" * 100_000),
    "nested and closed": forged("..", b"[" * 100_000 + b"1" + b"]" * 100_000 + b",2"),
    "objects 100,000 deep": forged("..", b'{"a":' * 100_000),
    "a number of 5,000 digits": forged("..", b"1" * 5000 + b",2"),
    "a list": forged("..", b"[1],2"),
    "an object": forged("..", b'{"a":1},2'),
    "bad UTF-8": forged("..", b'1,"\xff\xfe"'),
    "no JSON": forged("..", b"1,import"),
    "empty": forged("..", b""),
    "an open text": forged("..", b'1,"'),
    "a line break": forged("..", b'1,"\n"'),
    "an unknown letter": forged(".!", b"1,2"),
    "a letter beyond ASCII": forged(".\xff", b"1,2"),
    "no bytes": forged(".b", b'1,"?"'),
    "bytes of a number": forged(".b", b"1,2"),
    "no date": forged(".d", b'1,"2020-13-01"'),
    "a date of null": forged(".d", b"1,null"),
    "a decimal of a number": forged(".n", b"1,1.5"),
    "no decimal": forged(".n", b'1,"x"'),
    "a decimal as long as the universe": forged(".n", b'1,"1e999999999"'),
    "an interval of a text": forged(".i", b'1,"x"'),
    "an endless interval": forged(".i", b"1,1" + b"0" * 40),
    "no UUID": forged(".u", b'1,"x"'),
    "a UUID of a list": forged(".u", b"1,[2]"),
}


@pytest.mark.parametrize("poison", POISON.values(), ids=POISON.keys())
def test_poison_is_counted_and_harms_nobody_else(poison: bytes) -> None:
    good = pack(GOOD, NAMES[1])
    assert unpack(poison, width=2) == [BROKEN]
    assert unpack(poison, good, width=2) == [BROKEN, list(GOOD)]
    swapped = [NAMES[1], NAMES[0], NAMES[2]]
    found = unpack(good, poison, pack(GOOD, NAMES[2]), width=2, names=swapped)
    assert found == [list(GOOD), BROKEN, list(GOOD)]
    as_list = poison.replace(b"o1 ", b"l1 ").replace(STAMP.encode(), b"-")
    if resigned(poison[:-4]) == poison:
        as_list = resigned(as_list[:-4])
    assert isinstance(values.unpack_list(as_list, NAMES[0], FINGERPRINT), Unusable)


@pytest.mark.parametrize(("first", "second"), [
    (b"1,2],[3", b"4],[5,6"),
    (b"1,2],[3,4", b""),
    (b"", b"1,2],[3,4"),
    (b"1,2],\n[3,4", b"5"),
    (b'1,2],[3,"', b'",6'),
    (b'1,2],\n[3,"', b'"],\n[5,6'),
    (b'1,"', b'"'),
    (b'1,"', b'",2'),
    (b"1,2,[3,4", b"5],6"),
    (b'1,{"a":', b"2}"),
    (b"1,2]", b"[3,4"),
])  # fmt: skip
def test_two_forged_neighbours_do_not_move_an_honest_row(first: bytes, second: bytes) -> None:
    honest = pack(GOOD, NAMES[1])
    found = unpack(forged("..", first), honest, forged("..", second, NAMES[2]), width=2)
    assert found == [BROKEN, list(GOOD), BROKEN]


@given(st.lists(st.one_of(
    st.text('[]{},":1\n\\ ', max_size=12).map(str.encode), st.binary(max_size=8)
), min_size=2, max_size=2))  # fmt: skip
def test_no_neighbours_move_an_honest_row(bodies: list[bytes]) -> None:
    first, second = bodies
    found = unpack(
        forged("..", first), pack(GOOD, NAMES[1]), forged("..", second, NAMES[2]), width=2
    )
    assert found[1] == list(GOOD)
    for raw in (found[0], found[2]):
        assert raw is BROKEN or len(raw) == 2


@given(st.binary(max_size=300), st.integers(0, 500))
def test_random_damage_is_a_miss(noise: bytes, at: int) -> None:
    row = (7, "title", date(2020, 1, 1), Decimal("1.50"), b"\0", UUID(int=1), time(1), math.pi)
    raw = pack(row)
    at %= len(raw)
    for damaged in (noise, raw[:at] + noise, raw[:at] + noise + raw[at + len(noise) :]):
        assert unpack(damaged, width=8)[0] in (MISS, BROKEN) or damaged == raw


def test_intervals_keep_their_microseconds() -> None:
    longest = timedelta.max, timedelta.min, timedelta(microseconds=-1)
    assert unpack(pack(longest), width=3) == [list(longest)]


def test_a_value_says_what_it_is() -> None:
    raw = pack((7, None, "x[1]", datetime(2020, 1, 2, 3, 4, 5), Decimal("1.50")))
    body = rb'7,null,"x\u005b1\u005d","2020-01-02T03:04:05","1.50"'
    assert raw == forged("...tn", body)
