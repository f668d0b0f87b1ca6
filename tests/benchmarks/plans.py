"""Reads by plans: SQL that was compiled once. Their processor time against Django's, and the driver's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from django.db import connections

from sharded_orm.models.querysets.direct_plans import PlanQuerySet
from sharded_orm.models.querysets.plans import without_plans
from tests.benchmarks import by_hand
from tests.benchmarks.models import Photo, Plain
from tests.benchmarks.report import Line, at_most
from tests.benchmarks.site import Site
from tests.benchmarks.timing import Rounds, compare

CALLS = 60
#: A read of the rows of one user, and the share of Django's processor time that it may take.
Read = Callable[[Any, int, int], object]
READS: dict[str, tuple[float, Read]] = {
    "get(user_id=, pk=)": (0.4, lambda rows, user, pk: rows.get(user_id=user, pk=pk)),
    "filter(user_id=)[:20]": (0.5, lambda rows, user, pk: list(rows.filter(user_id=user)[:20])),
    "the same, ordered": (
        0.5,
        lambda rows, user, pk: list(rows.filter(user_id=user).order_by("-photo_id")[:20]),
    ),
    "exists()": (0.4, lambda rows, user, pk: rows.filter(user_id=user).exists()),
    "count()": (0.4, lambda rows, user, pk: rows.filter(user_id=user).count()),
    "first()": (0.4, lambda rows, user, pk: rows.filter(user_id=user).first()),
    "values_list(flat=True)[:20]": (
        0.4,
        lambda rows, user, pk: list(
            rows.filter(user_id=user).values_list("photo_id", flat=True)[:20]
        ),
    ),
    "values()[:20]": (
        0.5,
        lambda rows, user, pk: list(rows.filter(user_id=user).values("photo_id", "title")[:20]),
    ),
    "only()[:20]": (
        0.5,
        lambda rows, user, pk: list(rows.filter(user_id=user).only("title")[:20]),
    ),
    "pk__in= a list of 10": (
        0.5,
        lambda rows, user, pk: list(
            rows.filter(user_id=user, photo_id__in=[pk + number for number in range(10)])
        ),
    ),
    "exclude(stars=), isnull": (
        0.5,
        lambda rows, user, pk: list(
            rows.filter(user_id=user, stars__isnull=False).exclude(stars=1)[:20]
        ),
    ),
}


def reads_by_plan(site: Site, rounds: Rounds) -> Iterator[Line]:
    """Time reads of a sharded model and of a plain model by plans, against Django's own."""
    user, pk = site.photo(7)
    alias = site.stock("photos_00007")
    stock: Any = Plain.objects.using(alias)
    direct: Any = PlanQuerySet(Plain).using(alias)
    for what, (limit, read) in READS.items():
        for kind, rows in (("", Photo.objects), (", not sharded", direct)):
            measured = compare(
                lambda read=read, rows=rows: read(rows, user, pk),
                lambda read=read: read(stock, user, pk),
                rounds,
                number=CALLS,
            )
            yield at_most(limit, what + kind, "the same of Django", measured, of_cpu=True)
    yield _of_alias(rounds, user, pk, stock)
    yield from _falls_back(rounds, user, stock)
    if site.database.name == "mariadb":
        yield from _by_hand(rounds, user, pk, stock)
    yield _driver(rounds, user, pk, alias, stock)


def _of_alias(rounds: Rounds, user: int, pk: int, stock: Any) -> Line:
    rows = Photo.objects.using("photos_00007")
    measured = compare(
        lambda: rows.get(user_id=user, pk=pk),
        lambda: stock.get(user_id=user, pk=pk),
        rounds,
        number=CALLS,
    )
    return at_most(0.4, "get() after using()", "the same of Django", measured, of_cpu=True)


def _falls_back(rounds: Rounds, user: int, stock: Any) -> Iterator[Line]:
    def unplanned(rows: Any) -> object:
        return list(rows.filter(user_id=user, title__startswith="Photo")[:20])

    def off() -> object:
        with without_plans():
            return unplanned(Photo.objects)

    measured = compare(lambda: unplanned(Photo.objects), off, rounds, number=CALLS)
    yield at_most(1.1, "a shape without a plan", "plans off", measured, of_cpu=True)


def _by_hand(rounds: Rounds, user: int, pk: int, stock: Any) -> Iterator[Line]:
    for what, read in by_hand.READS.items():
        of_django = READS[what][1]
        assert read(user, pk) == READS[what][1](Photo.objects, user, pk)
        measured = compare(
            lambda read=read: read(user, pk),
            lambda of_django=of_django: of_django(stock, user, pk),
            rounds,
            number=CALLS,
        )
        yield at_most(1.0, f"{what}, by hand", "the same of Django", measured, goal=False)


def _driver(rounds: Rounds, user: int, pk: int, alias: str, stock: Any) -> Line:
    def get() -> object:
        with connections[alias].cursor() as cursor:
            cursor.execute(
                "SELECT photo_id, user_id, title, posted_at, stars FROM photo"
                " WHERE user_id = %s AND photo_id = %s LIMIT 21",
                (user, pk),
            )
            return cursor.fetchall()

    measured = compare(get, lambda: stock.get(user_id=user, pk=pk), rounds, number=CALLS)
    return at_most(1.0, "get() on the cursor alone", "the same of Django", measured, goal=False)
