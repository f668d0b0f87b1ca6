"""Random reads of models with columns of all types, and of a global model."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import IntEnum
from random import Random
from typing import Any
from uuid import UUID

from django.db.models import F, Q, Value
from django.utils.functional import SimpleLazyObject, lazystr
from django.utils.safestring import mark_safe
from hypothesis import strategies as st

from tests.queries.chains import Chain, Form, Values, chains, formatted, keywords, one_of, weighted
from tests.queries.conftest import NEAR, ONE, SHARD, START, TWO
from tests.queries.small_chains import Frame, frame_of_reads, small_chains
from tests.relatives.sharded.models import Agent, Item, Memo
from tests.samples.models import Sample


class Number(IntEnum):
    ONE = 1


class Text(str):
    """A text of a project."""


EAST = timezone(timedelta(hours=9))
NAIVE = datetime(2026, 1, 2, 3, 4, 5)
#: Values of each kind, of which some fit the columns.
VALUES = [
    "0", "1", "2", "7", "-1", "2**31", "2**70", "True", "False", "None", "'a'", "'é'", "''", "'1'",
    "'2026-01-02'", "'true'", "'x' * 99", "1.5", "float('nan')", "Decimal('1.50')", "Decimal('NaN')",
    "date(2026, 1, 2)", "NAIVE", "START", "time(3, 4)", "b'ab'", "NAIVE.replace(tzinfo=UTC)", "timedelta(days=1)",
    "UUID(int=7)", "str(UUID(int=7))", "lazystr('a')", "{'a': 1}", "F('number')", "[]", "[1, 2]", "[1, 1]",
    "['a', 'b']", "[None]", "[1, 'a']", "{True}", "{UUID(int=7)}", "{date(2026, 1, 2)}", "{1.5}", "(START, NAIVE)",
    "Number.ONE", "Text('a')", "mark_safe('a')", "SimpleLazyObject(lambda: 1)", "Value('a')", "Sample(id=1, owner=ONE)",
]  # fmt: skip
#: For each type of columns, values that fit, and similar ones.
_TYPES: dict[str, tuple[list[str], list[str]]] = {
    "number": (
        ["1", "0", "2", "7", "-1", "2**31", "2**63", "2**70"],
        ["Number.ONE", "'1'", "True", "1.0", "Decimal(1)", "None"],
    ),
    "text": (
        ["'a'", "'1'", "''", "'é'", "'A'", "'%s'"],
        ["Text('a')", "lazystr('a')", "mark_safe('a')", "1", "None", "b'a'"],
    ),
    "price": (["Decimal('1.50')", "1", "Decimal('1.5')"], ["1.5", "'1.5'", "True", "None", "Decimal('NaN')"]),
    "flag": (["True", "False"], ["None", "1", "'true'", "0", "Value(True)"]),
    "day": (["date(2026, 1, 2)", "date(2026, 1, 1)"], ["NAIVE", "START", "'2026-01-02'", "None"]),
    "at": (["START", "START + timedelta(days=1)", "START.astimezone(EAST)"], ["NAIVE", "date(2026, 1, 1)", "None"]),
    "code": (["UUID(int=7)", "UUID(int=6)"], ["str(UUID(int=7))", "7", "b'ab'", "None"]),
    "blob": (["b'ab'", "b''"], ["'ab'", "7", "None"]),
    "agent": (["Agent(pk=ONE)", "ONE", "Agent(pk=TWO)"], ["Agent()", "None", "'1'", "Item(pk=1)"]),
}  # fmt: skip
_COLUMNS = {
    **dict.fromkeys(("id", "number", "ratio", "pk", "stars", "owner_id", "content_type", "object_id"), "number"),
    **dict.fromkeys(("name", "label", "text"), "text"),
    "price": "price", "took": "price", "flag": "flag", "day": "day", "clock": "day", "at": "at", "posted_at": "at",
    "code": "code", "data": "text", "blob": "blob", "owner": "number", "agent": "agent",
}  # fmt: skip
COLUMNS = [
    "id", "name", "label", "text", "number", "price", "ratio", "flag", "day", "at", "clock", "took",
    "code", "data", "blob",
]  # fmt: skip
COLUMNS_OF_MEMOS = ["pk", "name", "stars", "posted_at", "owner", "owner_id", "content_type", "object_id"]  # fmt: skip
LOOKUPS = ["", "", "", "__exact", "__in", "__in", "__isnull", "__gt", "__lte", "__iexact", "__range"]  # fmt: skip


def values_of(column: str, lookup: str = "") -> Values:
    """Return what to compare with a column or to write to it."""
    fitting, similar = _TYPES[_COLUMNS[column]]
    # For bytes, a number is their count, and no server takes two gigabytes.
    others = [value for value in VALUES if column != "blob" or value != "2**31"]
    if lookup in ("__in", "__range"):
        one, other = fitting[:2]
        lists = [
            f"[{one}, {other}]",
            f"({other}, {one})",
            f"{{{one}, {one}}}",
            f"[{fitting[-1]}, {one}]",
        ]
        if lookup == "__in":
            lists.append(f"[{one}]")
        more = [
            *[f"[{value}]" for value in similar],
            f"[{one}, {similar[0]}]",
            f"[{one}, None]",
            "[F('id')]",
            "[]",
        ]
        return Values(lists, more, others)
    if lookup == "__isnull":
        return Values(["True", "False"], ["0", "1", "None"], others)
    return Values(fitting, similar, others)


PLACES: dict[str, Values] = {
    **{column + lookup: values_of(column, lookup) for column in _COLUMNS for lookup in LOOKUPS},
    "key": Values(["ONE", "ONE", "NEAR", "TWO"], ["'1'", "True", "Number.ONE", "None"]),
    "alias": Values(["SHARD[ONE]", "'default'", "SHARD[TWO]"], ["None", "'photos'", "'nowhere'"]),
    "slice": Values(["1:3", "0:2", "2:4", "1:2", ":1", "1:"], ["2:2", "3:1", ":", "0:4:2", "-1:"]),
}  # fmt: skip
_MEMOS = PLACES | {"owner" + lookup: values_of("agent", lookup) for lookup in ("", "__exact")}
MEANINGS: dict[str, Any] = {
    thing.__name__: thing
    for thing in (
        Agent, Decimal, F, Item, Memo, Number, Q, Sample, SimpleLazyObject, Text, UUID, Value, date, lazystr, mark_safe,
        time, timedelta,
    )
} | {"EAST": EAST, "NAIVE": NAIVE, "NEAR": NEAR, "ONE": ONE, "SHARD": SHARD, "START": START, "TWO": TWO, "UTC": UTC}  # fmt: skip
_SELECTIONS = [
    *[".values({})", ".values_list({})", ".only({})", ".defer({})"] * 2, ".values_list({}, flat=True)",
    ".values_list({}, named=True)", ".select_related({})",
]  # fmt: skip
_ENDS = [
    *["list({})"] * 4, "{}.count()", "{}.exists()", "{}.first()", "{}.get()", "list({}[<slice>])", "{}[<slice>].exists()",
    "{}[<slice>].count()", "list({}.values())", "list({}.order_by('-id').values_list())", "list({}.using(<alias>))",
]  # fmt: skip


def value_of(source: str) -> Chain:
    """Return what makes a value of the tables of this module."""
    return Chain(source, MEANINGS)


_STARTS = [
    *["Sample.objects.filter(owner=<key>)"] * 6,
    "Sample.objects.using(<alias>).filter(owner=<key>)",
]
_STARTS_OF_MEMOS = [
    *["Memo.objects.all()"] * 4,
    "Memo.objects.using(<alias>)",
    "Agent(pk=ONE).memos.all()",
]


def chains_of_samples() -> st.SearchStrategy[list[Chain]]:
    """Reads of :class:`Sample` that differ only in values."""
    return chains(_large(_STARTS, COLUMNS), PLACES, MEANINGS)


def chains_of_memos() -> st.SearchStrategy[list[Chain]]:
    """Reads of :class:`Memo`, a global model, that differ only in values."""
    return chains(_large(_STARTS_OF_MEMOS, COLUMNS_OF_MEMOS), _MEMOS, MEANINGS)


def small_chains_of_samples() -> st.SearchStrategy[list[Chain]]:
    """Small reads of :class:`Sample` that differ in one value or in one part."""
    return small_chains(_small(_STARTS, COLUMNS), PLACES, MEANINGS)


def small_chains_of_memos() -> st.SearchStrategy[list[Chain]]:
    """Small reads of :class:`Memo` that differ in one value or in one part."""
    return small_chains(_small(_STARTS_OF_MEMOS, COLUMNS_OF_MEMOS), _MEMOS, MEANINGS)


def _small(starts: Sequence[str], columns: Sequence[str]) -> Frame:
    lookups = ["", "", "", "__in", "__isnull", "__gt"]
    fields = [f"'{column}', 'pk'" for column in columns]
    return frame_of_reads(
        starts, [column + lookup for column in columns for lookup in lookups], fields
    )


def _large(starts: Sequence[str], columns: Sequence[str]) -> Form:
    names = [column + lookup for column in columns for lookup in LOOKUPS]

    def selections(pick: Random) -> str:
        # Without fields, a flat list takes no other argument.
        some = dict.fromkeys(pick.choice(columns) for _ in range(pick.randrange(4)))
        fields = ", ".join(map(repr, some))
        return pick.choice(_SELECTIONS).format(fields).replace("(, ", "(")

    step = weighted(
        (8, formatted(".{}({})", one_of("filter", "filter", "exclude"), keywords(names))),
        (2, selections),
        (1, one_of(".using(<alias>)")),
        (1, formatted(".order_by('{}')", one_of(*columns))),
    )

    def form(pick: Random) -> str:
        calls = "".join(step(pick) for _ in range(pick.randrange(4)))
        return pick.choice(_ENDS).format(pick.choice(starts) + calls)

    return form
