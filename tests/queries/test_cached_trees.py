"""Cached reads by plans whose conditions are trees of ``Q``: the entries, results and statements are
those of reads without plans, and the results are Django's.

Each generated read is done with plans, without plans, and by Django's own queryset on the shard. Rows are
written in between, so an entry that is valid for too long is noticed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import pytest
from django.db import connections
from django.db.models import Q, QuerySet
from django.test.utils import CaptureQueriesContext

from sharded_orm.cache.keys import Scope
from sharded_orm.cache.reader import Reader
from sharded_orm.cache.requests import CacheRequest, ListRequest, ObjectRequest
from sharded_orm.exceptions import ShardedOrmError
from sharded_orm.models.querysets.plans import without_plans
from tests.cached.models import CachedAlbum, CachedCountry, CachedPhoto, CachedPost
from tests.queries.conftest import DATABASES, LATER, NEAR, ONE, SHARD, START, TWO, Clock
from tests.queries.twins import comparable_value

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.long_on("mysql"),
    pytest.mark.django_db(transaction=True, databases=DATABASES),
]

# Few values, so that many conditions of one query have the same one.
NUMBERS = [0, 1, 2, 1, 2, 1, "1", "2", 1, 1, True, None]
LISTS = [[1], [1, 2], (1, 1), {2}, [2, 1], [1, 0], ["1"], [True], [None, 1], []]
KEYS = [ONE, ONE, ONE, ONE, ONE, "1", True, NEAR]


class Dice(random.Random):
    """Takes the values of conditions from a seed of their own: other values, and the same calls."""

    #: The shard key of the query. Instances in its conditions have it, too.
    key: dict[str, Any]

    def __init__(self, seed: int, values: int) -> None:
        super().__init__(seed)
        self.values = random.Random(f"{seed} {values}")

    def value(self, values: list[Any]) -> Any:
        return self.values.choice(values)


class Rows(NamedTuple):
    """Rows of one cached model. Two of them have the primary keys 1 and 2.

    :param aliases: the databases that have the rows, first that of most rows.
    :param key: the shard key, and values of it.
    :param leaves: makes conditions.
    :param changes: makes new values of a row.
    """

    model: Any
    aliases: list[str]
    key: dict[str, Any]
    leaves: list[Callable[[Dice], dict[str, Any]]]
    changes: list[Callable[[random.Random], dict[str, Any]]]


PHOTOS = Rows(
    CachedPhoto,
    [SHARD[ONE], SHARD[TWO]],
    {"user_id": [ONE, ONE, ONE, TWO]},
    [
        lambda dice: {dice.choice(["stars", "stars__gt", "title"]): dice.value(NUMBERS)},
        lambda dice: {"user_id": dice.value(KEYS)},
        lambda dice: {dice.choice(["pk", "photo_id"]): dice.value(NUMBERS)},
        lambda dice: {dice.choice(["album", "album_id"]): dice.value(NUMBERS)},
        lambda dice: {"album": CachedAlbum(pk=dice.value([1, 2]), **dice.key)},
        lambda dice: {dice.choice(["stars__in", "album__in", "pk__in"]): dice.value(LISTS)},
        lambda dice: {"posted_at__gt": START + timedelta(minutes=dice.value([0, 1]))},
        lambda dice: {"album__isnull": dice.choice([True, False])},
    ],
    [
        lambda dice: {"stars": dice.randrange(3)},
        lambda dice: {"album_id": dice.choice([1, None])},
        lambda dice: {"title": dice.choice("012")},
    ],
)
POSTS = Rows(
    CachedPost,
    ["default"],
    {},
    [
        lambda dice: {dice.choice(["topic", "topic", "topic__lte"]): dice.value(NUMBERS)},
        lambda dice: {dice.choice(["pk", "country", "country_id"]): dice.value(NUMBERS)},
        lambda dice: {"country": CachedCountry(pk=dice.value([1, 2]))},
        lambda dice: {dice.choice(["topic__in", "pk__in"]): dice.value(LISTS)},
        lambda dice: {"title": dice.value(NUMBERS)},
        lambda dice: {"topic__isnull": dice.choice([True, False])},
    ],
    [
        lambda dice: {"topic": dice.choice([1, 2, None])},
        lambda dice: {"title": dice.choice("012")},
    ],
)
ENDS: list[Callable[[Any], Any]] = [
    list, list, lambda rows: rows.count(), lambda rows: rows.exists(), lambda rows: rows.order_by("pk").first(),
    lambda rows: rows.get(), lambda rows: list(rows.order_by("-title", "pk")[:2]),
    lambda rows: list(rows.order_by("pk")[1:3]),
]  # fmt: skip


def tree(dice: Dice, kind: Rows, depth: int = 0) -> Q:
    choice = dice.random()
    connector = dice.choice(["AND", "AND", "OR"])
    if depth > 1 or choice < 0.4:
        named = dice.choice(kind.leaves)(dice)
        if dice.random() < 0.2:
            named |= dice.choice(kind.leaves)(dice)
        return Q(**named, _connector=connector)
    left, right = tree(dice, kind, depth + 1), tree(dice, kind, depth + 1)
    if choice < 0.55:
        return left | right
    if choice < 0.8:
        return left & right
    if choice < 0.9:
        parts = dice.choice([[left], [left, right]])
        return Q(*parts, _connector=connector, _negated=dice.random() < 0.3)
    return ~left


def chain(kind: Rows, seed: int, values: int, rows: Any) -> Any:
    """Run a random chain of calls. Other ``values`` give the same calls with other values."""
    dice = Dice(seed, values)
    key = dice.key = {name: dice.value(keys) for name, keys in kind.key.items()}
    if dice.random() < 0.8:
        rows = rows.filter(**key)
    for _ in range(dice.randrange(1, 3)):
        named = dice.choice([{}, {}, key, dice.choice(kind.leaves)(dice)])
        how = rows.filter if dice.random() < 0.85 else rows.exclude
        rows = how(tree(dice, kind), **named)
    if dice.random() < 0.2:
        rows = rows.filter(**key)
    if dice.random() < 0.2:
        return rows.get(tree(dice, kind), **key)
    return dice.choice(ENDS)(rows.all())


def result(call: Callable[[], Any]) -> Any:
    """Return the result or the error of ``call``. The order of rows may differ."""
    try:
        value = comparable_value(call())
    except Exception as exc:
        return type(exc), str(exc)
    return sorted(value, key=repr) if isinstance(value, list) else value


@contextmanager
def entries() -> Iterator[list[tuple[str, ...]]]:
    """Collect the names of the guards and entries that are looked up."""
    names: list[tuple[str, ...]] = []
    read, read_object = Reader.read, Reader.read_object

    def name_of(request: CacheRequest) -> str:
        assert isinstance(request, ObjectRequest | ListRequest)
        return request.name if isinstance(request, ObjectRequest) else request.query

    def reading(self: Any, requests: Any, **kwargs: Any) -> None:
        names.extend((*request.scope.guards, name_of(request)) for request in requests)
        read(self, requests, **kwargs)

    # By this method, plans read one row.
    def reading_object(
        self: Any, scope: Scope, form: Any, state: Any, pk: str, **kwargs: Any
    ) -> Any:
        names.append((*scope.guards, scope.object_name(pk)))
        return read_object(self, scope, form, state, pk, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reader, "read", reading)
        patch.setattr(Reader, "read_object", reading_object)
        yield names


def outcome(kind: Rows, call: Callable[[], Any]) -> tuple[Any, list[Any], list[str]]:
    """Return the result or the error of ``call``, the entries it looks up, and its statements."""
    with CaptureQueriesContext(connections[kind.aliases[0]]) as sent, entries() as names:
        value = result(call)
    return value, names, [query["sql"] for query in sent]


def is_refusal(value: Any) -> bool:
    is_error = isinstance(value, tuple) and isinstance(value[0], type)
    return is_error and issubclass(value[0], ShardedOrmError)


def compare(kind: Rows, seed: int, values: int) -> bool:
    """Compare one read; return whether it was answered by the cache."""
    objects = kind.model.objects
    read = partial(chain, kind, seed, values)
    with without_plans():
        value, names, _ = outcome(kind, lambda: read(objects))
    planned = outcome(kind, lambda: read(objects))
    assert planned[:2] == (value, names), (seed, values)
    if not is_refusal(value):
        rows = [QuerySet(kind.model, using=alias) for alias in kind.aliases]
        assert value in [result(partial(read, of_alias)) for of_alias in rows], (seed, values)
    kind.model.cache.invalidate()
    with without_plans():
        _, _, statements = outcome(kind, lambda: read(objects))
    kind.model.cache.invalidate()
    assert outcome(kind, lambda: read(objects))[2] == statements, (seed, values)
    return bool(names) and not planned[2]


def write(dice: random.Random, kind: Rows) -> None:
    new = dice.choice(kind.changes)(dice)
    key = {name: keys[0] for name, keys in kind.key.items()}
    rows = kind.model.objects.filter(**key, pk=dice.choice([1, 2]))
    if dice.random() < 0.5:
        rows.update(**new)
        return
    row = rows.get()
    for name, value in new.items():
        setattr(row, name, value)
    row.save(update_fields=list(new))


@pytest.mark.parametrize(
    "part", [0, *[pytest.param(n, marks=pytest.mark.long) for n in range(1, 20)]]
)
@pytest.mark.parametrize("kind", [PHOTOS, POSTS], ids=["sharded", "global"])
def test_random_trees(kind: Rows, part: int, placed: None, clock: Clock) -> None:
    for key, first in ((ONE, 1), (NEAR, 4), (TWO, 1)):
        CachedAlbum.objects.create(pk=first, user_id=key, title="a")
        for pk in range(first, first + 3):
            CachedPhoto.objects.create(
                pk=pk, user_id=key, title=str(pk % 3), stars=pk % 3, posted_at=START,
                album_id=None if pk % 3 == 0 else first,
            )  # fmt: skip
    for pk in range(1, 5):
        CachedCountry.objects.create(pk=pk, name=str(pk))
        CachedPost.objects.create(pk=pk, topic=pk % 3 or None, title=str(pk), country_id=pk)
    clock.ahead += LATER
    dice, hits = random.Random(part), 0
    for seed in range(part * 30, (part + 1) * 30):
        for values in (1, 2, 1, 3, 2, 2, 1):
            hits += compare(kind, seed, values)
            if dice.random() < 0.4:
                write(dice, kind)
            clock.ahead += LATER
    assert hits > 10
