"""Values compare as their database compares them."""

from __future__ import annotations

import datetime
from itertools import combinations

import pytest

from sharded_orm.exceptions import ScatterNotSupported
from sharded_orm.scatter.comparison import Column, OrderKey, SQLiteComparison
from sharded_orm.scatter.weighted_comparison import ComparedText, MySQLComparison, PaddedText

PLAIN, TEXT = Column("t", "c", "plain"), Column("t", "c", "text")
BLANK = b"\x00\x20"


def test_a_padded_text_goes_on_with_blanks() -> None:
    tab, nothing, letter = (PaddedText(weight, BLANK) for weight in (b"\x00\x09", b"", b"\x00\x41"))
    blanks = PaddedText(BLANK * 3, BLANK)
    assert blanks == nothing
    assert hash(blanks) == hash(nothing)
    # A tab is less than the blanks that pad the empty text.
    assert sorted([letter, nothing, tab]) == [tab, nothing, letter]


def test_texts_that_differ_beyond_the_reach_of_a_sort_are_refused() -> None:
    long = b"\x41" * 600
    assert not ComparedText(long) < ComparedText(long)
    assert ComparedText(b"\x40" + long) < ComparedText(long)
    with pytest.raises(ScatterNotSupported, match="Left"):
        _ = ComparedText(long + b"a") < ComparedText(long + b"b")


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("nulls_first", [False, True])
def test_nulls_have_their_place(descending: bool, nulls_first: bool) -> None:
    comparison = SQLiteComparison([PLAIN], [0])
    key = comparison.order([OrderKey(0, descending, nulls_first)])
    found = sorted([(2, 0), (None, 1), (1, 2)], key=key)
    values = [2, 1] if descending else [1, 2]
    assert [row[0] for row in found] == ([None, *values] if nulls_first else [*values, None])


def test_ties_go_by_shard() -> None:
    key = SQLiteComparison([PLAIN], [0]).order([OrderKey(0, True, False)])
    assert sorted([(1, 2), (1, 0), (1, 1)], key=key) == [(1, 0), (1, 1), (1, 2)]


def test_sqlite_orders_by_storage_class() -> None:
    rising = [-1, 2.5, 3, "", "2026-01-01", "a", "ä", "😀", b"", b"\xff"]
    comparison = SQLiteComparison([TEXT], [0])
    for low, high in combinations(rising, 2):
        assert comparison.normal([low], 0) < comparison.normal([high], 0)
    day = datetime.date(2026, 1, 1)
    assert comparison.normal([day], 0) == comparison.normal(["2026-01-01"], 0)
    assert comparison.normal([1], 0) == comparison.normal([1.0], 0)


def test_sqlite_refuses_other_collations() -> None:
    SQLiteComparison([Column("t", "c", "text", "binary")], [0])
    with pytest.raises(ScatterNotSupported, match="NOCASE"):
        SQLiteComparison([Column("t", "c", "text", "NOCASE")], [0])


def mysql(column: Column = TEXT) -> MySQLComparison:
    return MySQLComparison([column], [0], uuid_version=None)


@pytest.mark.parametrize(
    ("collation", "equal"),
    [
        ("utf8mb4_general_ci", True),
        ("utf8mb4_bin", True),
        ("utf8mb4_nopad_bin", False),
        ("utf8mb4_0900_ai_ci", False),
    ],
)
def test_mysql_pads_as_the_collation_says(collation: str, equal: bool) -> None:
    one = mysql().normal(["a", 0, b"\x00\x41", BLANK, collation], 0)
    other = mysql().normal(["a ", 0, b"\x00\x41" + BLANK, BLANK, collation], 0)
    assert (one == other) is equal


@pytest.mark.parametrize(
    "collation",
    ["utf8mb4_uca1400_as_cs", "utf8mb4_0900_as_cs", "utf8mb4_thai_520_w2", "big5_chinese_ci"],
)
def test_mysql_refuses_collations_of_several_levels(collation: str) -> None:
    with pytest.raises(ScatterNotSupported, match=collation):
        mysql().normal(["a", 0, b"a", b" ", collation], 0)


def test_mysql_refuses_text_where_none_was_declared() -> None:
    with pytest.raises(ScatterNotSupported, match="output_field"):
        mysql(PLAIN).normal(["a", 0], 0)


@pytest.mark.parametrize("version", [(10, 7, 3), (10, 11, 4), (11, 0, 2)])
def test_servers_that_sort_uuids_otherwise_are_refused(version: tuple[int, ...]) -> None:
    comparison = MySQLComparison([Column("t", "c", "uuid")], [0], uuid_version=version)
    row = ["0190163d-8694-739b-aea5-966c26f8ad91", 0]
    assert comparison.normal(row, 0) == row[0]
    with pytest.raises(ScatterNotSupported):
        comparison.ordered(row, 0)
