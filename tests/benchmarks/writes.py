"""Writes: rows in bulk, and a transaction with one update."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from django.db import connections, transaction

import sharded_orm
from tests.benchmarks import by_hand
from tests.benchmarks.models import Photo, Plain, Upload
from tests.benchmarks.report import Line, at_least, at_most
from tests.benchmarks.site import START, UPLOAD_SHARDS, Site
from tests.benchmarks.timing import Measured, Rounds, compare

BULK = 10_000
CALLS = 40
#: What a transaction with an update is to reach.
UPDATE_GOAL = {"mariadb": 0.9, "postgresql": 1.0}


def bulk_create(site: Site, rounds: Rounds) -> Iterator[Line]:
    """Compare rows per second: ours draws ids and groups by shard, stock has ids and one table."""
    rows = rounds.of(BULK)
    rounds = Rounds(max(3, rounds.count // 2))
    alias = site.stock("uploads_00005")
    for users, limit in ((1, 0.9), (1000, 0.7)):
        spread = "one user" if users == 1 else f"{users} users over {UPLOAD_SHARDS} shards"
        yield at_least(
            limit,
            f"bulk_create, {rows} rows of {spread}: rows/s",
            "stock on one database",
            _compare_bulk(site, alias, rows, users, rounds),
        )


def _compare_bulk(site: Site, alias: str, rows: int, users: int, rounds: Rounds) -> Measured:
    uploads, plain = _instances(Upload, rows, users), _instances(Plain, rows, users)
    for number, instance in enumerate(plain):
        instance.pk = number + 1

    def as_new() -> None:
        _empty(site)
        for instance in (*uploads, *plain):
            instance._state.adding, instance._state.db = True, None
        for instance in uploads:
            instance.photo_id = None

    return compare(
        lambda: Upload.objects.bulk_create(uploads),
        lambda: Plain.objects.using(alias).bulk_create(plain),
        rounds,
        before=as_new,
    )


def _instances(model: Any, rows: int, users: int) -> list[Any]:
    return [
        model(user_id=5 + n % users, title=f"Photo number {n}", posted_at=START, stars=n % 6)
        for n in range(rows)
    ]


def _empty(site: Site) -> None:
    with site.session() as cursor:
        for number in range(UPLOAD_SHARDS):
            cursor.execute(f"TRUNCATE {site.prefix}_uploads_{number:05d}.photo")


def save(site: Site, rounds: Rounds) -> Iterator[Line]:
    """Time ``save()`` of one changed row, of all its fields and of one."""
    user, pk = site.photo(7)
    alias = site.stock("photos_00007")
    ours, stock = Photo.objects.get(user_id=user, pk=pk), Plain.objects.using(alias).get(pk=pk)
    stars = count()

    def save_row(row: Any, **kwargs: Any) -> None:
        row.stars = next(stars)
        row.save(**kwargs)

    for kwargs in ({}, {"update_fields": ["stars"]}):
        measured = compare(
            lambda kwargs=kwargs: save_row(ours, **kwargs),
            lambda kwargs=kwargs: save_row(stock, **kwargs),
            rounds,
            number=CALLS,
        )
        what = "save() of one changed row" + (", update_fields" if kwargs else "")
        yield at_most(0.6, what, "save()", measured, of_cpu=True)
    if site.database.name == "mariadb":
        yield _save_by_hand(rounds, ours, stars, lambda: save_row(stock))
    yield _driver(rounds, pk, alias, stock, lambda: save_row(stock))


def _save_by_hand(rounds: Rounds, row: Photo, stars: Iterator[int], save_stock: Any) -> Line:
    def save() -> None:
        row.stars = next(stars)
        by_hand.save(row)

    measured = compare(save, save_stock, rounds, number=CALLS)
    return at_most(1.0, "save() of one changed row, by hand", "save()", measured, goal=False)


def _driver(rounds: Rounds, pk: int, alias: str, stock: Any, save_stock: Any) -> Line:
    """Time the UPDATE of such a save with the driver alone."""
    connection = connections[alias]
    posted_at = connection.ops.adapt_datetimefield_value(stock.posted_at)
    stars = count()

    def update() -> None:
        cursor = connection.connection.cursor()
        cursor.execute(
            "UPDATE photo SET user_id = %s, title = %s, posted_at = %s, stars = %s WHERE photo_id = %s",
            (stock.user_id, stock.title, posted_at, next(stars), pk),
        )
        cursor.close()

    measured = compare(update, save_stock, rounds, number=CALLS)
    return at_most(1.0, "the UPDATE of save() by the driver alone", "save()", measured, goal=False)


def atomic_update(site: Site, rounds: Rounds) -> Iterator[Line]:
    """Time a transaction with one statement in it."""
    user, pk = site.photo(7)
    alias = site.stock("photos_00007")
    stars = count()

    def ours() -> None:
        with sharded_orm.atomic(Photo, user_id=user):
            Photo.objects.filter(user_id=user, pk=pk).update(stars=next(stars))

    def stock() -> None:
        with transaction.atomic(using=alias):
            Plain.objects.using(alias).filter(pk=pk).update(stars=next(stars))

    measured = compare(ours, stock, rounds, number=CALLS)
    yield at_most(
        UPDATE_GOAL[site.database.name],
        "atomic() + one update",
        "transaction.atomic(using=) + update",
        measured,
    )
