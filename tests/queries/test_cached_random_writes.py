"""Random writes: what is read afterwards is what the database has, however often it was read before."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from django.core.exceptions import ObjectDoesNotExist
from django.db import DatabaseError, connections, models, transaction
from django.db.models import F, Value
from django.db.models.functions import Concat

from sharded_orm.cache.request_cache import cache_scope, uncached
from sharded_orm.exceptions import ShardedOrmError
from tests.cached.models import CachedAlbum, CachedCountry, CachedPhoto, CachedPost, CachedTag
from tests.queries.conftest import DATABASES, LATER, NEAR, ONE, SHARD, TWO, Clock

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.long_on("mysql"),
    pytest.mark.django_db(transaction=True, databases=DATABASES),
]

#: NEAR is on the shard of ONE.
KEYS = (ONE, NEAR, TWO)
STEPS = 40


class Program:
    """A random program on cached models, sharded and global.

    :param clock: the clock of the cache, which the program puts forward.
    """

    def __init__(self, seed: int, clock: Clock) -> None:
        self.dice = random.Random(seed)
        self.clock = clock
        self.done: list[str] = []
        self.in_hand: Any = None
        self.depth = 0

    # ##### Rows #####

    def photos(self, key: int | None = None) -> Any:
        return CachedPhoto.objects.filter(user_id=key or self.dice.choice(KEYS))

    def some(self, rows: Any) -> Any:
        """Return the row at a random place, or None."""
        at = self.dice.randrange(4)
        return next(iter(rows.order_by("pk")[at : at + 1]), None)

    def values(self) -> dict[str, Any]:
        values: dict[str, Any] = {"stars": self.dice.randrange(5), "title": self.dice.choice("abc")}
        return dict(self.dice.sample(sorted(values.items()), self.dice.randrange(1, 3)))

    # ##### Writes #####

    def create(self) -> None:
        key = self.dice.choice(KEYS)
        album = self.some(CachedAlbum.objects.filter(user_id=key))
        CachedPhoto.objects.create(user_id=key, album=album, **self.values())
        CachedTag.objects.get_or_create(user_id=key, name=self.dice.choice("xyz"))

    def create_many(self) -> None:
        keys = self.dice.choices(KEYS, k=3)
        CachedPhoto.objects.bulk_create([CachedPhoto(user_id=k, **self.values()) for k in keys])
        CachedAlbum.objects.create(user_id=keys[0], title="a")

    def change(self) -> None:
        photo = self.in_hand if self.dice.random() < 0.4 else self.some(self.photos())
        if photo is None or photo.pk is None:
            return
        values = self.values()
        if self.dice.random() < 0.4:
            values["album"] = self.some(CachedAlbum.objects.filter(user_id=photo.user_id))
        for name, value in values.items():
            setattr(photo, name, value)
        photo.save(update_fields=list(values) if self.dice.random() < 0.5 else None)

    def update(self) -> None:
        values = self.values()
        if self.dice.random() < 0.3:
            values |= {"stars": F("stars") + 1, "title": Concat("title", Value("!"))}
        if self.dice.random() < 0.3:
            values["album"] = None
        rows = self.photos().filter(stars__lt=self.dice.randrange(5))
        if self.dice.random() < 0.3:
            rows = CachedPhoto.objects.scatter().filter(stars=self.dice.randrange(5))
        rows.update(**values)

    def update_many(self) -> None:
        photos = list(self.photos().filter(stars__gt=2))
        for photo in photos:
            photo.stars -= 1
        self.photos().bulk_update(photos, ["stars"])

    def update_or_create(self) -> None:
        name = self.dice.choice("xyz")
        CachedTag.objects.update_or_create(
            user_id=self.dice.choice(KEYS), name=name, defaults={"uses": self.dice.randrange(9)}
        )
        CachedCountry.objects.update_or_create(
            name=name, defaults={"people": self.dice.randrange(9)}
        )

    def delete(self) -> None:
        row = self.some(self.dice.choice([self.photos(), CachedTag.objects.filter(user_id=ONE)]))
        if row is not None:
            row.delete()

    def delete_many(self) -> None:
        # Deletes photos by cascades.
        albums = CachedAlbum.objects.filter(user_id=self.dice.choice(KEYS))
        albums.filter(title=self.dice.choice("ab")).delete()

    def relate(self) -> None:
        key = self.dice.choice(KEYS)
        photo, album = (
            self.some(self.photos(key)),
            self.some(CachedAlbum.objects.filter(user_id=key)),
        )
        if photo is None or album is None:
            return
        tags = list(CachedTag.objects.filter(user_id=key)[: self.dice.randrange(3)])
        self.dice.choice([photo.tags.set, lambda tags: photo.tags.add(*tags)])(tags)
        self.dice.choice([album.photos.add, album.photos.remove, lambda _: album.photos.clear()])(
            photo
        )

    def write_globally(self) -> None:
        country = self.some(CachedCountry.objects.all())
        CachedPost.objects.create(topic=self.dice.choice([None, 1, 2]), country=country, title="p")
        CachedPost.objects.filter(topic=self.dice.choice([1, 2])).update(topic=2, title="q")
        if country is not None and self.dice.random() < 0.3:
            country.delete()

    def write_by_sql(self) -> None:
        key = self.dice.choice(KEYS)
        with connections[SHARD[key]].cursor() as cursor:
            table = CachedPhoto._meta.db_table
            cursor.execute(f"UPDATE {table} SET stars = stars + 1 WHERE user_id = %s", [key])
        CachedPhoto.cache.invalidate(user_id=key)

    def run_in_block(self) -> None:
        """Write in a transaction or a savepoint, and keep or undo it."""
        if self.depth == 2:
            return
        self.depth += 1
        is_kept = self.dice.random() < 0.5
        with ExitStack() as stack:
            for alias in ("default", "photos"):
                stack.enter_context(transaction.atomic(using=alias))
            for _ in range(self.dice.randrange(1, 4)):
                self.step()
            if not is_kept:
                for alias in ("default", "photos"):
                    transaction.set_rollback(True, using=alias)
        self.depth -= 1

    def run_in_scope(self) -> None:
        with cache_scope():
            for _ in range(self.dice.randrange(1, 4)):
                self.step()

    def read_in_thread(self) -> None:
        if self.depth:
            return

        def read() -> None:
            try:
                self.check()
            finally:
                connections.close_all()

        with ThreadPoolExecutor(1) as pool:
            pool.submit(read).result()

    def take_in_hand(self) -> None:
        photo = self.some(self.photos())
        self.in_hand = self.dice.choice([copy.copy, lambda row: pickle.loads(pickle.dumps(row))])(
            photo
        )

    def wait(self) -> None:
        self.clock.ahead += self.dice.choice([1, LATER])

    # ##### Reads #####

    def reads(self) -> list[Callable[[], Any]]:
        key = self.dice.choice(KEYS)
        photos = CachedPhoto.objects.filter(user_id=key)
        tags = CachedTag.objects.filter(user_id=key).order_by("name")
        posts = CachedPost.objects.filter(topic=self.dice.choice([1, 2])).order_by("pk")
        pk = getattr(self.some(photos), "pk", 0)
        album = getattr(self.some(CachedAlbum.objects.filter(user_id=key)), "pk", 0)
        return [
            lambda: list(photos.order_by("-stars", "pk")),
            lambda: list(photos.filter(album_id=album).order_by("pk")),
            lambda: list(photos.filter(stars__gt=2).order_by("title", "-pk")[1:3]),
            lambda: list(photos.filter(pk=pk)),
            lambda: list(photos.order_by("pk").prefetch_related("tags")),
            lambda: [photo.album for photo in photos.order_by("pk").select_related("album")],
            lambda: (photos.count(), photos.filter(album=None).count(), photos.exists()),
            lambda: (photos.filter(stars=3).exists(), photos.order_by("title", "pk").first()),
            lambda: list(CachedPhoto.objects.scatter().order_by("user_id", "pk")),
            lambda: list(tags.all()),
            lambda: list(posts.all()),
            lambda: list(CachedCountry.objects.filter(people__gt=3).order_by("name")),
        ]

    def check(self) -> None:
        """Read some rows again and again, through the cache and without it."""
        for read in self.dice.sample(self.reads(), 4):
            with uncached():
                expected = shown(read())
            for _ in range(3):
                rows = read()
                assert shown(rows) == expected, self.done
                scribble(rows)

    def step(self) -> None:
        name = self.dice.choice(ACTIONS)
        self.done.append(name)
        try:
            with ExitStack() as stack:
                for alias in ("default", "photos") if self.depth else ():
                    stack.enter_context(transaction.atomic(using=alias))
                getattr(self, name)()
        except (DatabaseError, ObjectDoesNotExist, ShardedOrmError) as exc:
            # For example, the row in hand was deleted.
            self.done.append(repr(exc))
        self.check()


ACTIONS = (
    "create", "create", "create_many", "change", "change", "change", "update", "update", "update_many",
    "update_or_create", "delete", "delete_many", "relate", "relate", "write_globally", "write_by_sql",
    "run_in_block", "run_in_scope", "read_in_thread", "take_in_hand", "wait",
)  # fmt: skip


def shown(value: Any) -> Any:
    """Return the values of rows, which compare by their primary keys alone."""
    if isinstance(value, models.Model):
        prefetched = getattr(value, "_prefetched_objects_cache", {})
        values = [getattr(value, field.attname) for field in value._meta.concrete_fields]
        tags = sorted(tag.name for rows in prefetched.values() for tag in rows)
        return value._state.db, values, tags
    return [shown(item) for item in value] if isinstance(value, list | tuple) else value


def scribble(value: Any) -> None:
    """Change the rows in memory, which no later read may notice."""
    if isinstance(value, models.Model):
        for rows in getattr(value, "_prefetched_objects_cache", {}).values():
            scribble(list(rows))
        for field in value._meta.concrete_fields:
            value.__dict__[field.attname] = "scribbled"
    elif isinstance(value, list | tuple):
        for item in value:
            scribble(item)


@pytest.mark.parametrize("seed", range(3))
def test_random_writes(clock: Clock, placed: None, seed: int) -> None:
    program = Program(seed, clock)
    for name in (
        "create_many",
        "create_many",
        "update_or_create",
        "write_globally",
        "check",
        "wait",
    ):
        getattr(program, name)()
    for _ in range(STEPS):
        program.step()
