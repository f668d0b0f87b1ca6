"""The rows of an owner, and the kinds of work that change them.

Imported only in processes that configure Django for these tests.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from django.db import connections, transaction

from tests.integration.cache.faults import staleness
from tests.integration.cache.faults.models import Item, Notice
from tests.integration.cache.faults.process_setup import (
    ALBUMS,
    GROUP,
    ITEMS,
    SHARDS,
    SOLO,
    schema_of,
)

ALIASES = ["default", *(f"{GROUP}_{number:05d}" for number in range(SHARDS))]


class Rollback(Exception):
    """Raised to roll a transaction back."""


class Owner:
    """The rows of one owner: the items of a user, or the global notices."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.model: Any = Item if number else Notice
        self._key = {"user_id": number} if number else {}
        self.alias = schema_of(number) if number else "default"
        self._table = self.model._meta.db_table

    def rows(self, **filters: Any) -> Any:
        return self.model.objects.filter(**self._key, **filters)

    def new(self, item: int, lane: int, dice: random.Random) -> Any:
        return self.model(item_id=item, lane=lane, **self._key, **_random_values(dice))

    def record_state(self, cursor: Any, lane: int) -> None:
        mine = "user_id = %s AND " if self.number else "%s = 0 AND "
        cursor.execute(
            f"SELECT item_id, album_id, shown, stamp FROM {self._table} WHERE {mine} lane = %s"
            " ORDER BY item_id",
            (self.number, lane),
        )
        text = staleness.state_text(cursor.fetchall())
        cursor.execute(
            "UPDATE truth SET state = %s WHERE owner = %s AND lane = %s", (text, self.number, lane)
        )
        cursor.execute(
            "INSERT INTO history SELECT owner, lane, epoch, state FROM truth"
            " WHERE owner = %s AND lane = %s",
            (self.number, lane),
        )

    # ##### Work on the lane that triggers record: one row, in autocommit #####

    def write_in_autocommit(self, dice: random.Random) -> None:
        item = dice.choice(ITEMS[self.number, SOLO])
        row = self.rows(item_id=item).uncached().first()
        how = dice.randrange(6)
        if row is None:
            self.new(item, SOLO, dice).save(force_insert=True)
        elif how == 0:
            row.delete()
        elif how == 1:
            self.rows(item_id=item).delete()
        elif how == 2:
            change(row, dice).save()
        elif how == 3:
            change(row, dice).save(update_fields=["album_id", "shown", "stamp", "note"])
        else:
            self.rows(item_id=item).update(**_random_values(dice))

    # ##### Work, inside of transact() #####

    def locked(self, lane: int) -> list[Any]:
        return list(self.rows(lane=lane).select_for_update().order_by("item_id"))

    def save(self, lane: int, dice: random.Random) -> None:
        if not (rows := self.locked(lane)):
            return self.create(lane, dice)
        change(dice.choice(rows), dice).save()

    def save_fields(self, lane: int, dice: random.Random) -> None:
        if not (rows := self.locked(lane)):
            return self.create(lane, dice)
        change(dice.choice(rows), dice).save(update_fields=["album_id", "shown", "stamp", "note"])

    def save_all(self, lane: int, dice: random.Random) -> None:
        for row in self.locked(lane):
            change(row, dice).save()

    def update_one(self, lane: int, dice: random.Random) -> None:
        item = dice.choice(ITEMS[self.number, lane])
        self.rows(item_id=item).update(**_random_values(dice))

    def update_some(self, lane: int, dice: random.Random) -> None:
        self.rows(lane=lane, shown=dice.random() < 0.5).update(**_random_values(dice))

    def update_lane(self, lane: int, dice: random.Random) -> None:
        self.rows(lane=lane).update(**_random_values(dice))

    def move(self, lane: int, dice: random.Random) -> None:
        one, other = dice.sample(ALBUMS, 2)
        self.rows(lane=lane, album_id=one).update(**{**_random_values(dice), "album_id": other})

    def create(self, lane: int, dice: random.Random) -> None:
        for row in self._missing(lane, dice)[:1]:
            row.save(force_insert=True)

    def create_many(self, lane: int, dice: random.Random) -> None:
        rows = self._missing(lane, dice)[:3]
        if rows:
            self.model.objects.bulk_create(rows)

    def _missing(self, lane: int, dice: random.Random) -> list[Any]:
        there = set(self.rows(lane=lane).select_for_update().values_list("item_id", flat=True))
        items = [item for item in ITEMS[self.number, lane] if item not in there]
        dice.shuffle(items)
        return [self.new(item, lane, dice) for item in items]

    def delete(self, lane: int, dice: random.Random) -> None:
        if len(rows := self.locked(lane)) > 2:
            dice.choice(rows).delete()

    def delete_some(self, lane: int, dice: random.Random) -> None:
        self.rows(lane=lane, item_id__in=dice.sample(ITEMS[self.number, lane], 2)).delete()

    def bulk_update(self, lane: int, dice: random.Random) -> None:
        if rows := self.locked(lane)[:4]:
            self.model.objects.bulk_update(
                [change(row, dice) for row in rows], ["album_id", "shown", "stamp", "note"]
            )

    def raw(self, lane: int, dice: random.Random) -> None:
        """Write by SQL that the library does not see, and announce it by hand."""
        self.model.cache.invalidate(**self._key)
        values = _random_values(dice)
        mine = "user_id = %s AND " if self.number else "%s = 0 AND "
        with connections[self.alias].cursor() as cursor:
            cursor.execute(
                f"UPDATE {self._table} SET shown = %s, stamp = %s, note = %s"
                f" WHERE {mine} lane = %s",
                (values["shown"], values["stamp"], values["note"], self.number, lane),
            )

    def several(self, lane: int, dice: random.Random) -> None:
        for work in dice.sample(WORKS[:-2], 3):
            getattr(self, work)(lane, dice)

    def savepoint(self, lane: int, dice: random.Random) -> None:
        """Work twice; the second time is rolled back to a savepoint."""
        getattr(self, dice.choice(WORKS[:-2]))(lane, dice)
        try:
            with transaction.atomic(using=self.alias):
                getattr(self, dice.choice(WORKS[:-2]))(lane, dice)
                raise Rollback
        except Rollback:
            pass


def transact(
    owners: Sequence[Owner], lanes: Iterable[int], work: Callable[[], None], *, keep: bool = True
) -> None:
    """Do ``work`` on rows in ``lanes``, and record the resulting states for the checker.

    :param owners: owners in one database.
    :param keep: False to roll the transaction back at the end.
    """
    alias = owners[0].alias
    with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
        places = [(owner, lane) for owner in owners for lane in sorted(lanes)]
        for owner, lane in places:
            cursor.execute(
                "UPDATE truth SET epoch = epoch + 1 WHERE owner = %s AND lane = %s",
                (owner.number, lane),
            )
        work()
        for owner, lane in places:
            owner.record_state(cursor, lane)
        if not keep:
            raise Rollback


def transact_together(
    owners: Sequence[Owner], lane: int, work: Callable[[Owner], None], *, keep: bool = True
) -> None:
    """Call :func:`transact` for each owner in one transaction of the group.

    The rows are on several shards, which commit one by one.
    """
    with transaction.atomic(using=GROUP):
        for owner in owners:
            transact((owner,), (lane,), functools.partial(work, owner))
        if not keep:
            raise Rollback


def sweep(owners: Sequence[Owner], lane: int, dice: random.Random) -> None:
    """Work on the rows of several owners at once, inside of transact(), without their keys."""
    first = owners[0]
    rows = first.model.objects.using(first.alias).filter(lane=lane, shown=dice.random() < 0.5)
    if dice.random() < 0.7:
        rows.update(**_random_values(dice))
        return
    # Like a program that sends SQL by itself, and announces everything.
    values = _random_values(dice)
    first.model.cache.invalidate(using=first.alias)
    with connections[first.alias].cursor() as cursor:
        cursor.execute(
            f"UPDATE {first.model._meta.db_table} SET shown = %s, stamp = %s, note = %s"
            " WHERE lane = %s",
            (values["shown"], values["stamp"], values["note"], lane),
        )


#: Names of all kinds of work; those that call others stand last.
WORKS = [
    "save", "save_all", "save_fields", "update_one", "update_some", "update_lane", "move", "create", "create_many", "delete",
    "delete_some", "bulk_update", "raw", "several", "savepoint",
]  # fmt: skip


def _random_values(dice: random.Random) -> dict[str, Any]:
    stamp = dice.getrandbits(53)
    return {
        "album_id": dice.choice(ALBUMS),
        "shown": dice.random() < 0.6,
        "stamp": stamp,
        "note": str(stamp),
    }


def change(row: Any, dice: random.Random) -> Any:
    """Give a row other values in each of its fields."""
    stamp = dice.getrandbits(53)
    row.album_id = next(album for album in ALBUMS if album != row.album_id)
    row.shown, row.stamp, row.note = not row.shown, stamp, str(stamp)
    return row
