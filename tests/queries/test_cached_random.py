"""Random queries: the cache gives the answers of the database, errors included."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from django.db.models import Case, F, Q, Value, When
from django.db.models.functions import Abs, Concat, Lower
from django.utils.timezone import override

from tests.cached.models import CachedPhoto
from tests.queries.conftest import DATABASES, ONE, START

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.long_on("mysql"),
    pytest.mark.django_db(transaction=True, databases=DATABASES),
]

ZONES = [timezone(timedelta(hours=hours)) for hours in (-11, 0, 9)]
ORDERS: list[Any] = [
    "stars", "-stars", "title", "album", "-album_id", "album__title", "posted_at", "price",
    F("stars").desc(), F("album_id").asc(nulls_first=True), F("album_id").asc(nulls_last=True),
    Lower("title").desc(),
]  # fmt: skip


def one(dice: random.Random) -> Q:
    number = dice.randrange(-1, 6)
    compared = dice.choice(["", "__gt", "__gte", "__lt", "__lte"])
    text = dice.choice(["", "__iexact", "__contains", "__icontains", "__startswith", "__gt"])
    part = dice.choice(["hour", "minute", "day", "year", "year__gte", "month__lt"])
    same: list[Any] = [number, str(number), float(number), number + 0.5, bool(number % 2)]
    some: list[Any] = [[number], {number, 9}, [str(number)], [], [None, number], [F("user_id")]]
    made: list[Callable[[], Q]] = [
        lambda: Q(**{f"stars{compared}": dice.choice([*same, Decimal(number)])}),
        lambda: Q(stars__in=dice.choice(some)),
        lambda: Q(stars__range=dice.choice([(0, number), [0, number], (F("user_id"), number)])),
        lambda: Q(**{f"title{text}": dice.choice(["p1", "P1", "p", "1", "%", "_", "p%", ""])}),
        lambda: Q(title__in=dice.choice([["p1"], ("p1", "P2"), [Value("p1")]])),
        lambda: Q(album=None),
        lambda: Q(album_id=dice.choice([1, "1", 2, None])),
        lambda: Q(album__title="a"),
        lambda: Q(price=dice.choice([Decimal("1.5"), Decimal("1.50"), "1.5", 2])),
        lambda: Q(posted_at__gt=START.astimezone(dice.choice(ZONES)) + timedelta(minutes=number)),
        lambda: Q(posted_at__date=START.date() + timedelta(days=dice.choice([0, -1]))),
        lambda: Q(**{f"posted_at__{part}": dice.choice([0, 1, 2, 23, 2026])}),
        lambda: Q(pk=dice.choice([number, str(number)])),
        lambda: Q(stars__gt=F("user_id") + number),
        lambda: Q(stars__gt=Abs(Value(number))),
        lambda: Q(title=Concat(Value("p"), Value(str(number)))),
        lambda: Q(Case(When(stars__gt=number, then=Value(True)), default=Value(False))),
    ]
    return dice.choice(made)()


def condition(dice: random.Random, depth: int = 0) -> Q:
    if depth > 2 or dice.randrange(100) < 50:
        return one(dice)
    left, right = condition(dice, depth + 1), condition(dice, depth + 1)
    found = dice.choice([left & right, left | right, left ^ right])
    return ~found if dice.randrange(100) < 30 else found


def query(dice: random.Random, number: int) -> Any:
    rows: Any = CachedPhoto.objects.filter(user_id=ONE).order_by("pk")
    if number % 3 == 1:
        return rows.filter(one(dice), posted_at__year=2026)
    if number % 3 == 2:
        # Much like another one.
        left, right = Q(stars__gt=dice.randrange(2)), Q(title__gt="p2")
        found = dice.choice([left | right, left ^ right])
        return rows.filter(found) if dice.random() < 0.5 else rows.exclude(found)
    rows = CachedPhoto.objects.filter(user_id=dice.choice([ONE, str(ONE), float(ONE)]))
    for _ in range(dice.randrange(3)):
        how = rows.exclude if dice.random() < 0.25 else rows.filter
        rows = how(condition(dice))
    if dice.random() < 0.2:
        other = CachedPhoto.objects.filter(user_id=ONE).filter(condition(dice))
        rows = rows | other if dice.random() < 0.5 else rows & other
    rows = rows.order_by(*dice.sample(ORDERS, dice.randrange(3)), dice.choice(["pk", "-pk"]))
    if dice.random() < 0.2:
        rows = rows.reverse()
    if dice.random() < 0.1:
        rows = rows.distinct()
    if dice.random() < 0.3:
        start = dice.randrange(4)
        rows = rows[start : start + dice.randrange(3)]
    return rows


def results(rows: Any) -> list[Any]:
    reads: list[Callable[[], Any]] = [
        lambda: [photo.pk for photo in rows.all()],
        lambda: rows.count(),
        lambda: rows.exists(),
        lambda: rows.first(),
        lambda: rows.get(),
    ]
    found: list[Any] = []
    for ask in reads:
        try:
            found.append(ask())
        except Exception as exc:  # any error of Django's: it must be the same
            found.append((type(exc), str(exc)))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_random_queries(photos, seed):
    dice = random.Random(seed)
    for number in range(120):
        with override(dice.choice(ZONES)):
            rows = query(dice, number)
            plain = results(rows.uncached())
            for _ in range(3):
                assert results(rows) == plain, (seed, number, str(rows.query))
