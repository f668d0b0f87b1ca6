"""Reads from one shard: always the same shard, and another shard each time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

from django.db import connections

from tests.benchmarks.models import Photo, Placed, Plain
from tests.benchmarks.report import Line, at_most
from tests.benchmarks.site import START, Site
from tests.benchmarks.timing import Rounds, compare

CALLS = 60


def get_staying(site: Site, rounds: Rounds) -> Iterator[Line]:
    """Time ``get()`` on a session that is already on the shard."""
    user, pk = site.photo(7)
    alias = site.stock("photos_00007")
    ours, stock = Photo.objects, Plain.objects

    measured = compare(
        lambda: ours.get(user_id=user, pk=pk),
        lambda: stock.using(alias).get(pk=pk),
        rounds,
        number=CALLS,
    )
    yield at_most(1.1, "get(user_id=, pk=), staying", "using(alias).get(pk=)", measured)
    measured = compare(
        lambda: ours.get(user_id=user, pk=pk),
        lambda: stock.using(alias).get(user_id=user, pk=pk),
        rounds,
        number=CALLS,
    )
    yield at_most(1.1, "  the same", "stock with both conditions", measured, goal=False)
    measured = compare(
        lambda: ours.using("photos_00007").get(pk=pk),
        lambda: stock.using(alias).get(pk=pk),
        rounds,
        number=CALLS,
    )
    yield at_most(
        1.1, "  using(alias).get(pk=)", "the same: connections alone", measured, goal=False
    )
    yield _by_directory(site, rounds)


def _by_directory(site: Site, rounds: Rounds) -> Line:
    placed = Placed.objects.create(user_id=1, title="Photo number 1", posted_at=START, stars=1)
    pk, alias = placed.pk, site.stock(str(placed._state.db))
    measured = compare(
        lambda: Placed.objects.get(user_id=1, pk=pk),
        lambda: Plain.objects.using(alias).get(pk=pk),
        rounds,
        number=CALLS,
    )
    return at_most(1.1, "  by a warm directory", "using(alias).get(pk=)", measured, goal=False)


def get_alternating(site: Site, rounds: Rounds) -> Iterator[Line]:
    """Time ``get()`` on changing shards: ours with one connection, stock with one per shard."""
    photos = [site.photo(number) for number in range(site.shards)]
    stock = [(site.stock(f"photos_{n:05d}"), pk) for n, pk in photos]
    for alias, _ in stock:
        connections[alias].ensure_connection()
    next_ours, next_stock = cycle(photos), cycle(stock)

    def get_ours() -> None:
        user, pk = next(next_ours)
        Photo.objects.get(user_id=user, pk=pk)

    def get_stock() -> None:
        alias, pk = next(next_stock)
        Plain.objects.using(alias).get(pk=pk)

    for _ in photos:
        get_ours()
        get_stock()
    measured = compare(get_ours, get_stock, rounds, number=CALLS)
    yield at_most(
        1.3,
        f"get(user_id=, pk=), alternating over {site.shards} shards",
        f"stock with {site.shards} connections",
        measured,
    )


def filter_page(site: Site, rounds: Rounds) -> Iterator[Line]:
    """Time a page of a user's rows."""
    user, _ = site.photo(7)
    alias = site.stock("photos_00007")
    measured = compare(
        lambda: list(Photo.objects.filter(user_id=user)[:20]),
        lambda: list(Plain.objects.using(alias).filter(user_id=user)[:20]),
        rounds,
        number=CALLS,
    )
    yield at_most(1.1, "filter(user_id=)[:20]", "using(alias).filter(user_id=)[:20]", measured)
