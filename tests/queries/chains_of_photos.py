"""Random reads of cached photos, which might get each other's entries in the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date, timedelta, timezone, tzinfo
from decimal import Decimal
from random import Random
from typing import Any

from django.db.models import Case, F, Q, Value, When
from django.db.models.functions import Abs, Concat, Lower
from django.utils.timezone import override
from hypothesis import strategies as st

from tests.cached.models import CachedAlbum, CachedPhoto
from tests.queries.chains import Chain, Form, Values, chains, filled, formatted, one_of, weighted
from tests.queries.conftest import NEAR, ONE, START, TWO
from tests.queries.small_chains import Frame, small_chains

WEST, EAST = (timezone(timedelta(hours=hours)) for hours in (-11, 9))


def fill() -> None:
    """Make photos with values that repeat: six of ONE, three of NEAR, and four of TWO with keys of ONE's."""
    for key, pks in {ONE: range(1, 7), NEAR: range(7, 10), TWO: range(1, 5)}.items():
        album = CachedAlbum.objects.create(user_id=key, pk=pks[0], title="a")
        for pk in pks:
            CachedPhoto.objects.create(
                pk=pk,
                user_id=key,
                title=f"p{(pk * 2) % 5}" if pk != 6 else "P2%",
                stars=(pk * 3) % 5,
                price=Decimal(pk) / 2 if pk % 3 else None,
                posted_at=START + timedelta(minutes=pk) if pk != 5 else None,
                album=album if pk % 3 == 1 else None,
            )


def seen_from(zone: tzinfo, read: Callable[[], Any]) -> Any:
    with override(zone):
        return read()


# -- Values


def _values(fitting: list[str], similar: Sequence[str] = (), others: Sequence[str] = ()) -> Values:
    """Return the values of one place. The entry of a value might be taken for that of any other."""
    return Values(fitting, [*fitting, *similar], others)


_COLUMNS = [
    *["", "'stars', ", "'-stars', ", "'title', ", "'-title', ", "'album', ", "'-album_id', ", "'posted_at', ", "'price', "] * 2,
    "F('stars').desc(), ", "F('album_id').asc(nulls_first=True), ", "F('album_id').asc(nulls_last=True), ",
    "Lower('title').desc(), ",
    # Reads another table, and is not cached.
    "'album__title', ",
]  # fmt: skip
# Whole orders, so that the database has no choice.
_ORDERS = [
    first + second + last
    for second in ("", *_COLUMNS)
    for first in _COLUMNS
    for last in ("'pk'", "'-pk'")
]
# Few values are errors, because many conditions have several.
PLACES: dict[str, Values] = {
    "key": _values(["ONE", "ONE", "ONE", "ONE", "NEAR", "TWO"], ["str(ONE)", "float(ONE)", "True"], ["None"]),
    "number": _values(
        ["1", "0", "2", "3", "4", "-1"], ["'1'", "1.0", "1.5", "True", "Decimal(1)", "2**63", "F('user_id')"],
        ["None", "'x'", "[1]", "START"],
    ),
    "numbers": _values(["[1]", "{1, 4}", "[0, 3]", "(2, 3)", "[1, 1]"], ["['1']", "[]", "[None, 1]", "[F('user_id')]", "[1.5]"]),
    "range": _values(["(0, 1)", "[0, 3]", "(1, 4)"], ["(F('user_id'), 3)", "('0', 1)"]),
    "text": _values(["'p1'", "'p'", "'P1'", "'1'", "'%'", "'_'", "'p%'", "''"], ["1", "Value('p1')"]),
    "texts": _values(["['p1']", "('p1', 'P2%')", "['p1', 'p3']"], ["[Value('p1')]", "[1]"]),
    "digit": _values(["'1'", "'3'", "''"]),
    "album": _values(["1", "2", "7"], ["'1'", "None", "1.0"]),
    "an_album": _values(["CachedAlbum(pk=1, user_id=ONE)", "1", "None"], ["CachedAlbum(pk=1, user_id=TWO)"]),
    "price": _values(["Decimal('0.5')", "1", "2.5", "Decimal('0.50')"], ["'0.5'"]),
    "time": _values([f"START + timedelta(minutes={minutes})" for minutes in (2, 4, 0)], ["START.astimezone(EAST)"], ["None"]),
    "day": _values(["date(2026, 1, 1)", "date(2025, 12, 31)"], ["'2026-01-01'", "START"]),
    "hour": _values(["0", "9", "13"], ["'9'"]),
    "day_of_month": _values(["1", "31"], ["'31'"]),
    "minute": _values(["1", "3"]),
    "year": _values(["2026", "2025"], ["'2026'"]),
    "pk": _values(["1", "2", "5", "8"], ["'1'", "1.0", "2**63"], ["None"]),
    "condition": _values(["True", "False"]),
    "slice": _values(["0:2", "1:3", "0:3", "2:4", "1:2", ":1", "1:", "0:9"], ["2:2"], ["-1:"]),
    "zone": _values(["EAST", "WEST", "UTC"]),
    # Parts that are not values.
    "column": _values(["stars", "pk"]),
    "compared": _values(["", "__gt", "__gte", "__lt", "__lte"]),
    "text_compared": _values(["", "__gt", "__iexact", "__contains", "__icontains", "__startswith"]),
    "order": _values(_ORDERS),
    "reverse": _values(["", "", ".reverse()"]),
    "method": _values(["filter", "filter", "exclude"]),
    "connector": _values(["|", "&", "^"]),
    "sign": _values(["~", ""]),
}  # fmt: skip

# -- Conditions

_leaves = one_of(
    *["Q(<column><compared>=<number>)"] * 10, *["Q(title<text_compared>=<text>)"] * 8,
    *["Q(stars__in=<numbers>)", "Q(stars__range=<range>)", "Q(pk=<pk>)", "Q(posted_at__gt=<time>)"] * 2,
    "Q(title__in=<texts>)", "Q(price=<price>)", "Q(album=None)", "Q(album_id=<album>)", "Q(album=<an_album>)", "Q(album__title='a')",
    "Q(posted_at__date=<day>)", "Q(posted_at__hour=<hour>)", "Q(posted_at__day=<day_of_month>)",
    "Q(posted_at__minute=<minute>)", "Q(posted_at__year=<year>)", "Q(posted_at__year__gte=<year>)", "Q(posted_at__month__lt=2)",
    "Q(posted_at__isnull=<condition>)", "Q(stars__gt=F('user_id') + <number>)", "Q(stars__gt=Abs(Value(<number>)))",
    "Q(title=Concat(Value('p'), Value(<digit>)))",
    "Q(Case(When(stars__gt=<number>, then=Value(True)), default=Value(False)))",
)  # fmt: skip


def _trees(inner: Form) -> Form:
    return weighted(
        (7, _leaves), (3, formatted("({} <connector> {})", inner, inner)), (2, formatted("<sign>{}", inner))
    )  # fmt: skip


_conditions = _trees(_trees(_leaves))


def condition(pick: Random) -> Q:
    """Return one random condition."""
    found: Q = Chain(str(filled(_conditions(pick), PLACES, pick)), MEANINGS)()
    return found


# -- Chains

_STARTS = [
    *["CachedPhoto.objects.filter(user_id=<key>)"] * 4,
    # One object, if there is no other condition.
    "CachedPhoto.objects.filter(user_id=<key>, pk=<pk>)",
    # Django compiles the query to name its entry.
    "CachedPhoto.objects.filter(user_id=<key>, posted_at__year=2026)",
]
_call = formatted(".<method>({})", _conditions)
_ENDS = [
    *["list({})"] * 7, "{}.exists()", *["{}.count()"] * 2, "{}.first()", "{}.get()",
]  # fmt: skip


def _parts(pick: Random) -> list[str]:
    def sometimes(percent: int, form: Form) -> str:
        return form(pick) if pick.randrange(100) >= 100 - percent else ""

    return [
        pick.choice(_STARTS),
        sometimes(85, _call),
        sometimes(20, _call),
        sometimes(10, formatted("<connector> ROWS.filter({})", _conditions)),
        ".order_by(<order>)<reverse>",
        sometimes(10, one_of(".distinct()")),
        sometimes(40, one_of("[<slice>]")),
        pick.choice(_ENDS),
        sometimes(30, one_of("<zone>")),
    ]


def _joined(parts: Sequence[str]) -> str:
    start, call, other_call, combination, order, distinct, page, end, zone = parts
    rows = start + call + other_call
    if combination:
        rows = f"({rows} {combination.replace('ROWS', start)})"
    read = end.format(rows + order + distinct + page)
    return f"seen_from({zone}, lambda: {read})" if zone else read


_frame = Frame(_parts, _joined, compared=(1, 4, 6))
MEANINGS: dict[str, Any] = {
    thing.__name__: thing
    for thing in (
        Abs, CachedAlbum, CachedPhoto, Case, Concat, Decimal, F, Lower, Q, Value, When, date, seen_from, timedelta,
    )
} | {"EAST": EAST, "NEAR": NEAR, "ONE": ONE, "START": START, "TWO": TWO, "UTC": START.tzinfo, "WEST": WEST}  # fmt: skip


def chains_of_photos() -> st.SearchStrategy[list[Chain]]:
    """Reads of :class:`CachedPhoto` that differ only in values, of any kind."""
    return chains(lambda pick: _joined(_parts(pick)), PLACES, MEANINGS)


def small_chains_of_photos() -> st.SearchStrategy[list[Chain]]:
    """Reads of :class:`CachedPhoto` that differ in one value, or in one part."""
    return small_chains(_frame, PLACES, MEANINGS)


# -- Chosen reads

_CONDITIONS = [
    "stars__gt=1", "pk__gt=1", "stars__gte=1", "stars__lt=1", "stars=1", "pk=1", "album_id=1", "stars__in=[1, 3]", "stars__in=[1]",
    "stars__range=(1, 3)", "stars=F('user_id')", "stars__gt=F('user_id')", "stars__gt=Abs(Value(1))", "stars=True", "title='1'",
    "title__contains='1'", "album=None", "posted_at=None",
]  # fmt: skip
_TREES = [
    call.format("Q(stars__gt=1)", connector, "Q(title__gt='p2')")
    for connector in "&|^"
    for call in ("filter({} {} {})", "exclude({} {} {})", "filter({} {} ~{})", "filter(~({} {} {}))")
]  # fmt: skip
_WHOLE_ORDERS = [
    "'pk'", "'-pk'", "'stars', 'pk'", "'-stars', 'pk'", "'stars', '-pk'", "'title', 'pk'", "F('stars').desc(), 'pk'",
    "Lower('title').desc(), 'pk'", "'album__title', 'pk'",
]  # fmt: skip
_PAGES = ["", "[:1]", "[:2]", "[1:2]", "[1:]", "[2:4]", "[9:]"]
_IN_ZONES = [
    "posted_at__hour=0", "posted_at__day=1", "posted_at__year=2026",
    "posted_at__date=date(2026, 1, 1)", "posted_at__date=START",
]  # fmt: skip


def _alike(conditions: str) -> list[list[str]]:
    """Return lists of reads that differ in little, and most of which have other results."""
    rows = f"CachedPhoto.objects.filter({conditions})"
    return [
        [f"list({rows}.filter({condition}).order_by('pk'))" for condition in _CONDITIONS],
        [f"list({rows}.{tree}.order_by('pk'))" for tree in _TREES],
        [f"list({rows}.order_by({order}){end})" for order in _WHOLE_ORDERS for end in ("", ".reverse()")],
        [f"list({rows}.order_by('pk'){page})" for page in _PAGES],
        [end.format(rows.replace("ONE", key) + ".order_by('pk')") for key in ("ONE", "NEAR", "TWO") for end in dict.fromkeys(_ENDS)],
    ]  # fmt: skip


def alike_chains_of_photos() -> list[list[Chain]]:
    """Chosen reads of :class:`CachedPhoto`, which every run compares."""
    reads = [
        # The entries of the first ones are named by their conditions, and those of the others by their SQL.
        *_alike("user_id=ONE"),
        *_alike("user_id=ONE, posted_at__year=2026"),
        # Some of these are one object.
        [f"list(CachedPhoto.objects.filter(user_id=ONE, pk=2).filter({condition}))" for condition in _CONDITIONS],
        [f"list(CachedPhoto.objects.filter(user_id=ONE, pk=2)[{page}])" for page in (":1", "1:2", ":0")],
        [
            f"seen_from({zone}, lambda: CachedPhoto.objects.filter(user_id=ONE).filter({part}).count())"
            for part in _IN_ZONES
            for zone in ("UTC", "EAST", "WEST")
        ],
    ]  # fmt: skip
    return [[Chain(source, MEANINGS) for source in sources] for sources in reads]
