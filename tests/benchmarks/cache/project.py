"""One side of the comparison: a process with a project of its own.

Started as ``python -m tests.benchmarks.cache.project SIDE``, where SIDE is the JSON of a
:class:`Side`. The process writes ``null`` when it is ready. It then answers each line of its
standard input with one line of JSON, which is ``{"error": TEXT}`` if the order failed:

================ =============================================================
make             create table and rows in the first database; ``null``
warm             read everything until the database is not queried any more;
                 number of statements of the last pass: 0 if the side caches
time WORK COUNT  seconds that COUNT calls took, and seconds of processor time
read SECONDS     number of reads of either kind done in this time
write RATE SECONDS   number of writes done in this time, at most RATE a second
================ =============================================================

Imports our library on our side only: peers run in an environment without it.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import django
from django.conf import settings
from django.db import connections, transaction
from django.db.models.base import ModelState

USERS, PHOTOS, PAGE, SHARDS = 96, 40, 20, 8
#: The user whose photos are read when one photo and one list are enough.
USER = 7
START = datetime(2026, 1, 1, tzinfo=UTC)
#: The condition of a page. All rows meet it, but it is part of every query.
SINCE = START - timedelta(days=1)
# Calls before the clock starts, because another process had the processor.
_FIRST_CALLS = 5
# Nothing is stored under a new guard of our cache for ten seconds.
_WARM_WITHIN = 40.0
# What the driver alone needs to connect.
_DRIVER = frozenset({"host", "port", "user", "password", "passwd", "unix_socket", "charset"})


@dataclass(frozen=True)
class Side:
    """What a process needs to know about its side.

    :param kind: ``plain``, ``cacheops``, ``yupoo`` or ``ours``.
    :param database: an entry of ``DATABASES`` without its name and engine.
    :param prefix: start of the database names.
    :param cache: an entry of ``CACHES``; for ``cacheops`` the value of ``CACHEOPS_REDIS``.
    """

    kind: str
    database: dict[str, Any]
    prefix: str
    cache: dict[str, Any] | None = None


def shard_schema(prefix: str, number: int) -> str:
    return f"{prefix}_photos_{number:05d}"


def configure(side: Side) -> None:
    """Set Django up."""
    connection = {
        **side.database,
        "OPTIONS": {"charset": "utf8mb4", "isolation_level": "read committed"},
        "CONN_MAX_AGE": None,
    }
    stock = "django.db.backends.mysql"
    databases = {"default": {"ENGINE": stock, "NAME": f"{side.prefix}_one", **connection}}
    common: dict[str, Any] = {
        "SECRET_KEY": "benchmarks",
        "USE_TZ": True,
        "TIME_ZONE": "UTC",
        "DEFAULT_AUTO_FIELD": "django.db.models.BigAutoField",
        "DATABASES": databases,
        "INSTALLED_APPS": ["tests.benchmarks.cache.stock"],
    }
    if side.kind == "cacheops":
        common |= {
            "INSTALLED_APPS": ["cacheops", *common["INSTALLED_APPS"]],
            "CACHEOPS_REDIS": side.cache,
            "CACHEOPS": {"stock.photo": {"ops": "all", "timeout": 3600}},
        }
    elif side.cache is not None:
        common["CACHES"] = {"default": side.cache}
    if side.kind == "ours":
        from sharded_orm.topology.aliases import sharded_databases

        common |= {
            "INSTALLED_APPS": ["sharded_orm", "tests.benchmarks.cache.sharded"],
            "DATABASES": sharded_databases(databases),
            "DATABASE_ROUTERS": ["sharded_orm.routers.ShardRouter"],
            "SHARDED_ORM": {
                "NODES": {"node": {"ENGINE": "sharded_orm.backends.mysql", **connection}},
                "GROUPS": {
                    "photos": {
                        "STRATEGY": "modulo",
                        "RANGES": [{"range": (0, SHARDS - 1), "primary": "node"}],
                        "DATABASE_NAME": side.prefix + "_{group}_{shard:05d}",
                    }
                },
                "TICKETS": ["default"],
                "CACHE": {"OBJECTS": "default"},
            },
        }
    settings.configure(**common)
    django.setup()


class Works:
    """The kinds of work that are timed; each method does one of them once."""

    model: Any

    def object(self, user: int = USER, pk: int = USER * PHOTOS) -> Any:
        """Read a photo by its key."""
        return self.model.objects.get(pk=pk)

    def page(self, user: int = USER) -> list[Any]:
        """Read the latest photos of a user."""
        return list(self._latest(user))

    def _latest(self, user: int) -> Any:
        rows = self.model.objects.filter(user_id=user, posted_at__gt=SINCE)
        return rows.order_by("-posted_at")[:PAGE]

    def load(self) -> list[Any]:
        """Read all rows without the cache."""
        return list(self.model.objects.all())

    def save(self, row: Any) -> None:
        # Always a new value: the server would not write an unchanged row.
        row.stars = random.getrandbits(30)
        row.save()

    def atomic(self) -> Any:
        """Run a transaction."""
        return transaction.atomic()

    def transact(self, row: Any) -> None:
        with self.atomic():
            self.save(row)


class Stock(Works):
    def __init__(self) -> None:
        from tests.benchmarks.cache.stock.models import Photo

        self.model = Photo


class Cacheops(Stock):
    def load(self) -> list[Any]:
        return list(self.model.objects.all().nocache())


class Yupoo(Stock):
    def __init__(self) -> None:
        super().__init__()
        from tests.benchmarks.cache import yupoo

        yupoo.connect()
        self._get, self._photos = yupoo.get, yupoo.photos

    def object(self, user: int = USER, pk: int = USER * PHOTOS) -> Any:
        return self._get(user, pk)

    def page(self, user: int = USER) -> list[Any]:
        return self._photos(user, self._latest(user))


class Ours(Works):
    #: The start of the database names.
    prefix = ""

    def __init__(self, name: str = "Photo") -> None:
        from tests.benchmarks.cache.sharded import models

        self.model = getattr(models, name)

    def object(self, user: int = USER, pk: int = USER * PHOTOS) -> Any:
        return self.model.objects.get(user_id=user, pk=pk)

    def least(self, what: str) -> Callable[[], Any]:
        """Return a function that does the least that some work needs, written by hand for this one row.

        ``packet`` sends the packet of :meth:`object`, and parses the answer. ``object`` also makes the
        instance, and ``page`` does that for the rows of :meth:`page`. ``save`` opens and closes the markers
        of a write, and sends the UPDATE by the driver. None of these makes a query, looks for the
        shard, or checks anything.
        """
        from sharded_orm.cache.guards import Marker, Writer, closing, header, new_token, opening
        from sharded_orm.models.cached.cached_model import cached_model
        from sharded_orm.models.cached.queryset import current_reader

        cached, reader = cached_model(self.model), current_reader()
        key = pk = None
        if cached is not None:
            key, pk = cached.key_token(USER), cached.pk_token(USER * PHOTOS)
        assert cached is not None and reader is not None and key is not None and pk is not None
        alias = f"photos_{USER % SHARDS:05d}"
        scope = cached.scope(alias, key)
        server, name = reader.cache.objects(scope.place), scope.object_name(pk)

        def packet() -> Any:
            return server.read(scope.guards, (name,))

        if what == "packet":
            return packet
        rows = [vars(row) for row in (self.page() if what == "page" else [self.object()])]
        model, new = self.model, object.__new__

        def instances() -> list[Any]:
            made = []
            for row in rows:
                instance = new(model)
                instance.__dict__.update(row)
                instance._state = state = ModelState()
                state.adding, state.db = False, alias
                made.append(instance)
            return made

        if what in ("object", "page"):

            def read() -> Any:
                _ = packet() if what == "object" else server.read(scope.guards)
                return instances()

            return read
        connection: Any = connections[alias]
        parameters = connection.get_connection_params()
        driver = connection.Database.connect(**{
            option: value for option, value in parameters.items() if option in _DRIVER
        })  # fmt: skip
        driver.autocommit(True)
        cursor = driver.cursor()
        schema = shard_schema(self.prefix, USER % SHARDS)
        fields = [
            field.attname for field in model._meta.concrete_fields if field.attname != "photo_id"
        ]
        sql = (
            f"UPDATE `{schema}`.photo SET {', '.join(f'{field} = %s' for field in fields)}"
            f" WHERE photo_id = %s"
        )

        saves = itertools.count()

        def save() -> None:
            # A new guard now and then, because nobody compacts it.
            guard = f"{scope.guards[-1]}-{next(saves) // 10}"
            values = [rows[0][field] for field in fields]
            values[fields.index("stars")] = random.getrandbits(30)
            token, now = new_token(), time.time()
            marker = Marker(token, now, False, Writer("server", "account", 1), frozenset((pk,)))
            server.mark([(guard, opening(marker))], header(now), 7200.0)
            cursor.execute(sql, [*values, USER * PHOTOS])
            lines = [(guard, closing(token, void=False))]
            server.finish([name], lines, lambda: None)

        return save

    def atomic(self) -> Any:
        import sharded_orm

        return sharded_orm.atomic(self.model, user_id=USER)

    def load(self) -> list[Any]:
        rows = self.model.objects.uncached()
        return [row for user in range(USERS) for row in rows.filter(user_id=user)]


_SIDES: dict[str, Callable[[], Works]] = {
    "plain": Stock,
    "cacheops": Cacheops,
    "yupoo": Yupoo,
    "ours": Ours,
}


class Program:
    """Answers the orders on standard input."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._works = _SIDES[side.kind]()
        Ours.prefix = side.prefix
        self._rows: list[Any] = []

    # ##### Before #####

    def make(self) -> None:
        model = self._works.model
        with connections["default"].schema_editor() as editor:
            editor.create_model(model)
        model.objects.bulk_create(
            model(
                photo_id=user * PHOTOS + number,
                user_id=user,
                album_id=number % 4,
                title=f"Photo number {number}",
                description="The light of that evening was something else. " * 4,
                posted_at=START + timedelta(minutes=number * 37 % 101),
                stars=number % 6,
                price=Decimal(number) / 4,
            )
            for user in range(USERS)
            for number in range(PHOTOS)
        )

    def warm(self) -> int:
        end = time.monotonic() + _WARM_WITHIN
        while (statements := self._asked()) and time.monotonic() < end:
            if self._side.kind == "plain":
                break
            time.sleep(0.5)
        return statements

    def _asked(self) -> int:
        statements = 0

        def count(execute: Any, *args: Any) -> Any:
            nonlocal statements
            statements += 1
            return execute(*args)

        with contextlib.ExitStack() as stack:
            for alias in self._aliases():
                stack.enter_context(connections[alias].execute_wrapper(count))
            for user in range(USERS):
                assert len(self._works.page(user)) == PAGE
                for pk in range(user * PHOTOS, (user + 1) * PHOTOS):
                    assert self._works.object(user, pk).pk == pk
        return statements

    def _aliases(self) -> list[str]:
        if self._side.kind != "ours":
            return ["default"]
        return [f"photos_{number:05d}" for number in range(SHARDS)]

    # ##### The clock runs #####

    def time(self, what: str, count: str) -> tuple[float, float]:
        with self._prepared(what) as call:
            for _ in range(_FIRST_CALLS):
                call()
            calls = range(int(count))
            gc.collect()
            gc.disable()
            began, processor = time.perf_counter(), time.process_time()
            for _ in calls:
                call()
            processor = time.process_time() - processor
            seconds = time.perf_counter() - began
            gc.enable()
        return seconds, processor

    @contextlib.contextmanager
    def _prepared(self, what: str) -> Iterator[Callable[[], Any]]:
        """Return the function for WORK.

        WORK is ``object``, ``page``, ``save`` or ``transact``. After ``twin-`` it uses the model
        that is not cached; after ``again-`` it runs in a request that has done the same work
        before. After ``least-``, which also knows ``packet``, it is the least that the work needs.
        """
        *how, what = what.split("-")
        works = Ours("Twin") if "twin" in how else self._works
        with contextlib.ExitStack() as stack:
            if "again" in how:
                from sharded_orm import cache_scope

                stack.enter_context(cache_scope())
            if "least" in how:
                assert isinstance(works, Ours)
                yield works.least(what)
                return
            work = getattr(works, what)
            if what in ("save", "transact"):
                row = works.model.objects.filter(user_id=USER)[3]
                yield lambda: work(row)
            else:
                yield work

    def read(self, seconds: str) -> int:
        done, chance = 0, random.Random()
        end = time.monotonic() + float(seconds)
        while time.monotonic() < end:
            user = chance.randrange(USERS)
            self._works.object(user, user * PHOTOS + chance.randrange(PHOTOS))
            self._works.page(chance.randrange(USERS))
            done += 2
        return done

    def write(self, rate: str, seconds: str) -> int:
        self._rows = self._rows or self._works.load()
        done, chance = 0, random.Random()
        began = time.monotonic()
        while (passed := time.monotonic() - began) < float(seconds):
            late = passed - done / float(rate)
            if late < 0:
                time.sleep(-late)  # keeps the rate that was asked for
                continue
            self._works.save(chance.choice(self._rows))
            done += 1
        return done


def main(raw: str) -> None:
    side = Side(**json.loads(raw))
    configure(side)
    program = Program(side)
    # The garbage collector does not walk the objects that Django has loaded again and again.
    gc.collect()
    gc.freeze()
    print("null", flush=True)
    for line in sys.stdin:
        order, *arguments = line.split()
        try:
            answer = getattr(program, order)(*arguments)
        except Exception as exc:  # any error goes into the report of this side
            traceback.print_exc()
            answer = {"error": repr(exc)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
