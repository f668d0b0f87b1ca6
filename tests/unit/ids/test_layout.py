"""Ids composed of parts: the published values, every bound, round trips."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db.migrations.writer import MigrationWriter
from hypothesis import given
from hypothesis import strategies as st

from sharded_orm.exceptions import InvalidID, TimestampExhausted
from sharded_orm.ids.layout import (
    EPOCH,
    PACKED,
    TIMESTAMPED,
    PackedID,
    PackedLayout,
    TimestampedID,
    TimestampedLayout,
)

BIGINT = 2**63 - 1
NO_NUMBERS: list[Any] = [True, False, 1.0, "1", None, -1, 2**80]


def bits(count: int) -> st.SearchStrategy[int]:
    """Numbers of that many bits, often at the edges."""
    last = (1 << count) - 1
    return st.one_of(st.sampled_from(sorted({0, min(1, last), last})), st.integers(0, last))


@st.composite
def packed(draw: Any) -> PackedID:
    widths = [draw(st.integers(1, 21)) for _ in range(3)]
    layout = draw(st.sampled_from([PACKED, PackedLayout(*widths)]))
    return PackedID(
        draw(bits(layout.shard_bits)),
        draw(bits(layout.type_bits)),
        draw(bits(layout.local_bits)),
        layout,
    )


@st.composite
def timestamped(draw: Any) -> TimestampedID:
    narrow = TimestampedLayout(time_bits=30, shard_bits=20, sequence_bits=6)
    layout = draw(st.sampled_from([TIMESTAMPED, narrow]))
    return TimestampedID(
        draw(st.one_of(st.just(layout.last_millisecond), st.integers(0, layout.last_millisecond))),
        draw(bits(layout.shard_bits)),
        draw(bits(layout.sequence_bits)),
        layout,
    )


def test_the_published_packed_id() -> None:
    found = PackedID.from_int(241294492511762325)
    assert found == PackedID(3429, 1, 7075733)
    assert found.to_int() == int(found) == 241294492511762325
    assert repr(found) == "PackedID(shard=3429, type=1, local=7075733)"


def test_the_published_timestamped_id() -> None:
    made = TimestampedID(1387263000, 31341 % 2000, 5001 % 1024)
    assert made.shard == 1341
    assert int(made) == 11637205501278089
    assert TimestampedID.from_int(11637205501278089) == made


@given(packed())
def test_packed_round_trip(value: PackedID) -> None:
    assert PackedID.from_int(int(value), value.layout) == value
    assert 0 <= int(value) <= BIGINT
    shift = value.layout.shard_shift
    assert int(value) >> shift == value.shard


@given(timestamped())
def test_timestamped_round_trip(value: TimestampedID) -> None:
    assert TimestampedID.from_int(int(value), value.layout) == value
    assert 0 <= int(value) <= BIGINT
    assert TimestampedID.at(value.time, value.shard, value.sequence, value.layout) == value
    layout = value.layout
    assert (int(value) >> layout.shard_shift) % (1 << layout.shard_bits) == value.shard


@given(timestamped(), timestamped())
def test_timestamped_ids_order_by_time(one: TimestampedID, other: TimestampedID) -> None:
    if one.layout == other.layout and one.milliseconds != other.milliseconds:
        assert (int(one) < int(other)) == (one.time < other.time)


@given(packed(), st.integers(1, 2**70))
def test_a_packed_part_that_does_not_fit_is_named(value: PackedID, beyond: int) -> None:
    parts = {"shard": value.shard, "type": value.type, "local": value.local}
    widths = value.layout
    for name in parts:
        last = (1 << getattr(widths, f"{name}_bits")) - 1
        for wrong in (last + beyond, -beyond):
            with pytest.raises(InvalidID, match=rf"^{name}={wrong} .* 0 to {last}\."):
                PackedID(**{**parts, name: wrong}, layout=widths)


@given(timestamped(), st.integers(1, 2**70))
def test_a_timestamped_part_that_does_not_fit_is_named(value: TimestampedID, beyond: int) -> None:
    parts = {"milliseconds": value.milliseconds, "shard": value.shard, "sequence": value.sequence}
    layout = value.layout
    for name in ("shard", "sequence"):
        last = (1 << getattr(layout, f"{name}_bits")) - 1
        for wrong in (last + beyond, -beyond):
            with pytest.raises(InvalidID, match=rf"^{name}={wrong} .* 0 to {last}\."):
                TimestampedID(**{**parts, name: wrong}, layout=layout)
    with pytest.raises(TimestampExhausted, match=r"^milliseconds=.* later epoch"):
        TimestampedID(layout.last_millisecond + beyond, 0, 0, layout)
    with pytest.raises(InvalidID, match=r"^milliseconds=-"):
        TimestampedID(-beyond, 0, 0, layout)


@pytest.mark.parametrize("wrong", NO_NUMBERS, ids=repr)
def test_what_is_no_number_is_refused_everywhere(wrong: Any) -> None:
    for make in (
        lambda: PackedID(wrong, 0, 0),
        lambda: PackedID(0, wrong, 0),
        lambda: PackedID(0, 0, wrong),
        lambda: TimestampedID(wrong, 0, 0),
        lambda: TimestampedID(0, wrong, 0),
        lambda: TimestampedID(0, 0, wrong),
        lambda: PackedID.from_int(wrong),
        lambda: TimestampedID.from_int(wrong),
        lambda: PackedLayout(shard_bits=wrong),
        lambda: TimestampedLayout(sequence_bits=wrong),
    ):
        with pytest.raises(InvalidID):
            make()


def test_the_top_two_bits_of_a_packed_id_are_zero() -> None:
    assert int(PackedID(2**16 - 1, 2**10 - 1, 2**36 - 1)) == 2**62 - 1
    with pytest.raises(InvalidID, match=str(2**62)):
        PackedID.from_int(2**62)


def test_the_time_ends_with_the_sign_of_a_bigint() -> None:
    last = TimestampedID(2**40 - 1, 2**13 - 1, 2**10 - 1)
    assert int(last) == BIGINT
    assert last.time == EPOCH + timedelta(milliseconds=2**40 - 1)
    assert 34.8 < (last.time - EPOCH).days / 365.25 < 34.9
    with pytest.raises(TimestampExhausted):
        TimestampedID(2**40, 0, 0)
    with pytest.raises(InvalidID):
        TimestampedID.from_int(2**63)


def test_an_epoch_of_ones_own() -> None:
    layout = TimestampedLayout(datetime(2030, 1, 1, tzinfo=UTC))
    moment = datetime(2030, 1, 1, 0, 0, 1, 5999, tzinfo=UTC)
    made = TimestampedID.at(moment, 7, 0, layout)
    assert made.milliseconds == 1005
    assert made.time == moment.replace(microsecond=5000)
    with pytest.raises(InvalidID, match="milliseconds=-"):
        TimestampedID.at(EPOCH, 7, 0, layout)
    for wrong in (datetime(2030, 1, 1), 0, None):
        with pytest.raises(InvalidID, match="time zone"):
            TimestampedLayout(wrong)  # type: ignore[arg-type]


def test_widths_that_are_no_layout() -> None:
    assert PackedLayout(20, 13, 30).shard_shift == 43
    with pytest.raises(InvalidID, match="64 bits together, and an id has 63"):
        PackedLayout(17, 11, 36)
    with pytest.raises(InvalidID, match="type_bits must be one bit"):
        PackedLayout(type_bits=0)
    with pytest.raises(InvalidID, match="65 bits together"):
        TimestampedLayout(time_bits=42)
    with pytest.raises(InvalidID, match="sign of a BIGINT"):
        TimestampedLayout(time_bits=1, shard_bits=33, sequence_bits=30)


def test_the_ids_that_a_table_counts() -> None:
    counted = PACKED.counted(3429, 1)
    assert counted.start == (3429 << 46) | (1 << 36) | 1
    assert len(counted) == 2**36 - 1
    assert PackedID.from_int(counted[-1]) == PackedID(3429, 1, 2**36 - 1)
    assert PackedID.from_int(counted.stop) == PackedID(3429, 2, 0)


@pytest.mark.parametrize("layout", [PackedLayout(10, 10, 10), TimestampedLayout(shard_bits=5)])
def test_migrations_can_write_a_layout(layout: Any) -> None:
    text, imports = MigrationWriter.serialize(layout)
    names: dict[str, Any] = {}
    exec("\n".join(imports), names)
    assert eval(text, names) == layout
