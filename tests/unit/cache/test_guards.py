"""The log of a guard: its meaning, in whatever order its lines arrived."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharded_orm.cache import guards
from sharded_orm.cache.guards import BrokenGuard, Marker, Writer, closing, header, opening, parse

NOW = 1_700_000_000.25
WRITER = Writer("6b1f-žluť", "app@%", 57)


def marker(*pks: str, wide: bool = False, everything: bool = False) -> Marker:
    listed = None if everything else frozenset(pks)
    return Marker(guards.new_token(), NOW, wide, WRITER, listed)


def test_a_new_guard_is_clean() -> None:
    guard = parse(header(NOW))
    assert guard.open == ()
    assert guard.created == NOW
    assert parse(header(NOW)).generation != guard.generation


markers = st.builds(
    Marker,
    token=st.uuids().map(lambda u: u.hex[:16]),
    at=st.integers(0, 10**13).map(lambda ms: ms / 1000),
    wide=st.booleans(),
    writer=st.builds(
        Writer,
        st.text(st.characters(codec="utf-8"), max_size=20),
        st.text(st.characters(codec="utf-8"), max_size=20),
        st.integers(0, 2**64 - 1),
    ),
    pks=st.none() | st.frozensets(st.from_regex(r"[0-9A-Za-z_.%~]{1,64}", fullmatch=True)),
)


@given(st.lists(markers, unique_by=lambda m: m.token, max_size=5))
def test_markers_come_back_as_they_were(made: list[Marker]) -> None:
    raw = header(NOW) + b"".join(map(opening, made))
    guard = parse(raw)
    assert guard.open == tuple(made)
    assert guard.size == len(raw)
    again = guards.compacted(guard)
    assert parse(again).open == tuple(made)
    assert guards.compacted(parse(again))[:17] == again[:17]


def test_what_an_open_marker_covers() -> None:
    guard = parse(header(NOW) + opening(marker("1", "2")) + opening(marker()))
    assert guard.covers("1") and not guard.covers("3")
    assert not guard.has_wide
    assert parse(header(NOW) + opening(marker(everything=True))).covers("3")
    assert parse(header(NOW) + opening(marker(wide=True))).has_wide
    assert marker(everything=True).voids and marker("1", wide=True).voids
    assert not marker("1").voids and not marker().voids


@pytest.mark.parametrize("void", [False, True])
def test_a_marker_is_closed_by_its_own_closing_only(void: bool) -> None:
    one, other = marker("1"), marker("1")
    raw = header(NOW) + opening(one) + opening(other)
    closed = parse(raw + closing(one.token, void=void))
    assert closed.open == (other,)
    assert (closed.generation != parse(raw).generation) is void


def test_two_writers_at_once_are_two_markers() -> None:
    one, other = marker("1"), marker("1")
    lines = [opening(one), opening(other), closing(one.token, void=False)]
    for order in itertools.permutations(lines):
        assert parse(header(NOW) + b"".join(order)).open == (other,)


def test_order_and_repetition_of_lines_do_not_count() -> None:
    shuffled = random.Random(4)
    made = [marker(str(n)) for n in range(6)]
    lines = [*map(opening, made), *(closing(m.token, void=False) for m in made[:4])]
    for _ in range(50):
        twice = lines + shuffled.choices(lines, k=4)
        shuffled.shuffle(twice)
        assert set(parse(header(NOW) + b"".join(twice)).open) == set(made[4:])


def test_a_mark_that_lands_after_its_closing_is_closed() -> None:
    late = marker("1")
    raw = header(NOW) + closing(late.token, void=False)
    guard = parse(raw)
    assert guard.early == (late.token,)
    assert parse(raw + opening(late)).open == ()
    # … even if the guard was compacted in between.
    shorter = guards.compacted(guard)
    assert parse(shorter + opening(late)).open == ()
    # Closed markers are dropped, so that the guard does not grow.
    many = b"".join(closing(guards.new_token(), void=True) for _ in range(100))
    assert parse(guards.compacted(parse(header(NOW) + many))).size < 1000


def test_no_earlier_generation_comes_back() -> None:
    seen: set[str] = set()
    lines: list[bytes] = []
    raw = header(NOW)
    for _ in range(30):
        lines.append(closing(marker("1").token, void=True))
        raw += lines[-1]
        generation = parse(raw).generation
        assert generation not in seen
        seen.add(generation)
        # An earlier line that arrives once more changes nothing …
        raw += random.Random(len(lines)).choice(lines)
        assert parse(raw).generation == generation
    # … and after compacting, which keeps the generation, it creates a new generation.
    raw = guards.compacted(parse(raw))
    assert parse(raw).generation == generation
    for line in lines:
        raw += line
        assert parse(raw).generation not in seen
        seen.add(parse(raw).generation)


def test_no_earlier_digest_comes_back() -> None:
    raw = header(NOW)
    seen = {parse(raw).digest}
    for _ in range(20):
        one = marker("1")
        for line in (opening(one), closing(one.token, void=False)):
            raw += line
            assert parse(raw).digest not in seen
            seen.add(parse(raw).digest)
        raw = guards.compacted(parse(raw))
        assert parse(raw).digest not in seen
        seen.add(parse(raw).digest)
    again = closing("a", void=False), closing("a", void=False)
    assert again[0] != again[1]


def test_compacting_keeps_what_counts() -> None:
    still = [marker("1"), marker(wide=True)]
    raw = header(NOW) + opening(still[0])
    for n in range(40):
        done = marker(str(n))
        raw += opening(done) + closing(done.token, void=n % 7 == 0)
    raw += opening(still[1])
    guard = parse(raw)
    assert guard.is_bulky
    shorter = guards.compacted(guard)
    after = parse(shorter)
    assert (after.generation, after.created, after.open) == (
        guard.generation, guard.created, tuple(still),
    )  # fmt: skip
    assert after.digest != guard.digest
    assert guard.spare == guard.size - len(shorter)
    assert not after.is_bulky and after.spare == 0
    assert guards.stamp([after]) == guards.stamp([guard])


def test_a_guard_full_of_open_markers_is_not_compacted_for_nothing() -> None:
    raw = header(NOW) + b"".join(opening(marker(str(n))) for n in range(40))
    assert len(raw) > guards.COMPACT_FROM
    assert not parse(raw).is_bulky


LINE = opening(Marker("ab", NOW, False, WRITER, frozenset({"1"})))


@pytest.mark.parametrize("raw", [
    b"",
    b"\n",
    b"\x80\x04\x95",
    header(NOW)[:-1],
    header(NOW)[1:],
    header(NOW) * 2,
    b"\n" + header(NOW),
    header(NOW) + b"\n",
    header(NOW).replace(b"\n", b"\r\n"),
    b"=,,0\n",
    b"=" + b"a" * 16 + b"," + b"b" * 16 + b"," + b"9" * 5000 + b"\n",
    header(NOW) + b"*ab,cd\n",
    header(NOW) + b"-ab\n",
    header(NOW) + b"-ab,\n",
    header(NOW) + b"!ab,short\n",
    header(NOW) + LINE[:-1],
    header(NOW) + LINE[:-4] + b"\n",
    header(NOW) + LINE[1:],
    header(NOW) + LINE.replace(b",n,", b",x,"),
    header(NOW) + LINE.replace(b",57,", b",,"),
    header(NOW) + LINE.replace(b",57,", b",-5,"),
    header(NOW) + LINE.replace(b",57,", b",5_7,"),
    header(NOW) + LINE.replace(b"%C5%BE", b"%C5"),
    header(NOW) + LINE.replace(b"%C5%BE", b"%C5 "),
    header(NOW) + LINE.replace(b",1\n", b",1 2\n"),
    header(NOW) + LINE.replace(b",1\n", b",1\rflush_all\n"),
    header(NOW) + LINE.replace(b",1\n", b",1-revision\n"),
    header(NOW) + LINE.replace(b",1\n", b",\xc5\xbe\n"),
    header(NOW) + LINE.replace(b",1\n", b",1" + b"\0" * 10_000 + b"\n"),
], ids=itertools.count())  # fmt: skip
def test_what_is_no_guard(raw: bytes) -> None:
    with pytest.raises(BrokenGuard):
        parse(raw)


@given(st.binary(max_size=200), st.integers(0, 300))
def test_damage_is_noticed_or_harmless(noise: bytes, at: int) -> None:
    raw = header(NOW) + LINE + closing("cd", void=True)
    at %= len(raw)
    for damaged in (noise, raw + noise, raw[:at] + noise, raw[:at] + noise + raw[at:]):
        try:
            parse(damaged)
        except BrokenGuard:
            pass


def test_large_guards_are_read_but_not_remembered() -> None:
    raw = header(NOW) + b"".join(opening(marker(str(n))) for n in range(200))
    assert len(parse(raw).open) == 200
    assert parse(raw) is not parse(raw)
    small = raw[: raw.index(b"\n") + 1]
    assert parse(small) is parse(bytes(bytearray(small)))


def test_stamps_and_revisions() -> None:
    table, key, other = (parse(header(NOW)) for _ in range(3))
    assert guards.stamp([table, key]) == table.generation + key.generation
    assert len({guards.revision(g) for g in ([table, key], [table, other], [key], [other])}) == 4
    # A narrow write in a wider scope does not touch the lists of a narrower one …
    one = marker("1")
    written = parse(header(NOW))
    raw = b"=%s,%s,%d\n" % (written.generation.encode(), b"0" * 16, NOW * 1000)
    closed = parse(raw + opening(one) + closing(one.token, void=False))
    assert guards.revision([closed, key]) == guards.revision([written, key])
    assert guards.revision([key, closed]) != guards.revision([key, written])
    # … a wide one does.
    voided = parse(raw + opening(one) + closing(one.token, void=True))
    assert guards.revision([voided, key]) != guards.revision([written, key])
    assert guards.stamp([voided, key]) != guards.stamp([written, key])


def test_digest_tells_parts_apart() -> None:
    assert guards.digest("ab", "c") != guards.digest("a", "bc")
    assert guards.digest("ab") == guards.digest(b"ab")
    assert len(guards.digest("")) == 24
