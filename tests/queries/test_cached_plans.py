"""Cached reads by plans: the entries, round trips, statements and results of reads without plans."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from random import Random
from typing import Any

import pytest
from django.db import connections, transaction
from django.db.models import Q
from django.test.utils import CaptureQueriesContext
from hypothesis import given
from hypothesis import strategies as st

from sharded_orm import bound, fetch_together
from sharded_orm.cache.reader import Reader
from sharded_orm.cache.request_cache import cache_scope
from sharded_orm.models.cached import cached_model, queryset
from sharded_orm.models.cached.request_plan import RequestPlan
from sharded_orm.models.querysets import first_recordings
from sharded_orm.models.querysets.plans import without_plans
from tests.cached.models import CachedAlbum, CachedCountry, CachedNote, CachedPhoto, CachedPost
from tests.queries.chains import as_many
from tests.queries.chains_of_photos import condition
from tests.queries.conftest import DATABASES, LATER, ONE, SHARD, START, TWO, Clock, cache, queries
from tests.queries.twins import comparable_value

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.long_on("mysql"),
    pytest.mark.django_db(transaction=True, databases=DATABASES),
]

Read = Callable[[], Any]


def together(*querysets: Any) -> list[list[Any]]:
    fetch_together(*querysets)
    return list(map(list, querysets))


#: A value of each kind, and a row that a test may write.
READS: dict[str, Callable[[list[CachedPhoto]], Any]] = {
    "get": lambda photos: CachedPhoto.objects.get(user_id=ONE, pk=photos[0].pk),
    "get of a filter": lambda photos: CachedPhoto.objects.filter(user_id=ONE).get(stars=1),
    "an object as a list": lambda photos: list(
        CachedPhoto.objects.filter(user_id=ONE, photo_id=photos[0].pk)
    ),
    "a list": lambda photos: list(CachedPhoto.objects.filter(user_id=ONE)),
    "a page": lambda photos: list(
        CachedPhoto.objects.filter(user_id=ONE, posted_at__gt=START).order_by("-posted_at")[1:3]
    ),
    "an isolate key": lambda photos: list(
        CachedPhoto.objects.filter(user_id=ONE, album_id=photos[0].album_id)
    ),
    "a list of values": lambda photos: list(
        CachedPhoto.objects.filter(user_id=ONE, stars__in=[3, 1]).order_by("pk")
    ),
    "null": lambda photos: list(CachedPhoto.objects.filter(user_id=ONE, album=None)),
    "exclude": lambda photos: list(CachedPhoto.objects.filter(user_id=ONE).exclude(stars=1)),
    "count": lambda photos: CachedPhoto.objects.filter(user_id=ONE, stars__gt=0).count(),
    "exists": lambda photos: CachedPhoto.objects.filter(user_id=ONE, title="p1").exists(),
    "first": lambda photos: CachedPhoto.objects.filter(user_id=ONE).first(),
    "together": lambda photos: together(CachedPhoto.objects.filter(user_id=ONE).order_by("pk")[:2]),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_of_a_known_shape_builds_no_query(
    name: str, photos: list[CachedPhoto], request: pytest.FixtureRequest
) -> None:
    read = partial(READS[name], photos)
    with without_plans():
        expected = comparable_value(read())
    for _ in range(4):
        assert comparable_value(read()) == expected
    request.getfixturevalue("nothing_is_compiled")
    assert queries(read) == 0
    # Misses build none, either, and store what they read.
    CachedPhoto.cache.invalidate()
    assert queries(read) == 1
    queries(read)  # A list on a store without read leases stores its objects now.
    assert queries(read) == 0
    with cache_scope():
        assert comparable_value([read(), read()]) == [expected, expected]


def test_a_bound_key_names_the_object(
    photos: list[CachedPhoto], request: pytest.FixtureRequest
) -> None:
    def get() -> CachedPhoto:
        with bound(user_id=ONE):
            return CachedPhoto.objects.get(pk=photos[0].pk)

    assert {get() for _ in range(5)} == {photos[0]}
    request.getfixturevalue("nothing_is_compiled")
    assert queries(get) == 0
    with bound(user_id=TWO), pytest.raises(AssertionError):
        CachedPhoto.objects.filter(stars=1).get(pk=photos[0].pk)


def test_a_global_model(clock: Clock, db_all: None, request: pytest.FixtureRequest) -> None:
    country = CachedCountry.objects.create(name="Utopia")
    for topic in (1, 2):
        CachedPost.objects.create(topic=topic, title=f"t{topic}", country=country)
    reads: list[Read] = [
        lambda: CachedCountry.objects.get(pk=country.pk),
        lambda: list(CachedPost.objects.filter(topic=1)),
        lambda: CachedPost.objects.filter(topic=2).count(),
        lambda: list(country.posts.order_by("title")),
    ]
    CachedCountry.objects.count(), CachedPost.objects.filter(topic=1).first()
    clock.ahead += LATER
    expected = [[read() for read in reads] for _ in range(6)]
    assert expected == [expected[0]] * 6
    request.getfixturevalue("nothing_is_compiled")
    results: list[Any] = []
    assert queries(lambda: results.extend(read() for read in reads), "default") == 0
    assert results == expected[0]


def test_a_transaction_sees_its_own_writes(photos: list[CachedPhoto]) -> None:
    read = partial(READS["a list of values"], photos)
    for _ in range(4):
        assert len(read()) == 2
    with transaction.atomic(using=SHARD[ONE]):
        CachedPhoto.objects.filter(user_id=ONE, stars=3).update(stars=4)
        assert len(read()) == 1
    assert len(read()) == 1


def test_values_and_deferred_fields_are_not_cached(photos: list[CachedPhoto]) -> None:
    rows = CachedPhoto.objects.filter(user_id=ONE).order_by("pk")
    for _ in range(5):
        assert queries(lambda: list(rows.values_list("stars", flat=True))) == 1
        assert queries(lambda: rows.only("title").count()) == 1
        assert [row.title for row in rows.only("title")] == [f"p{number}" for number in range(5)]


def test_a_foreign_key_by_an_instance(
    photos: list[CachedPhoto], request: pytest.FixtureRequest
) -> None:
    album = CachedAlbum.objects.get(user_id=ONE)
    other = CachedAlbum.objects.create(user_id=TWO, pk=album.pk, title="b")

    def read() -> Any:
        rows = CachedPhoto.objects.filter(user_id=ONE, album=album)
        return list(rows), list(album.photos.filter(user_id=ONE)), rows.count()

    with without_plans():
        expected = [read() for _ in range(3)][-1]
        assert queries(read) == 0
    for _ in range(5):
        # The entries are those of reads without plans.
        assert queries(read) == 0
        assert comparable_value(read()) == comparable_value(expected)
        assert not other.photos.filter(user_id=TWO)
        assert not other.photos.filter(user_id=ONE)
        assert CachedPhoto.objects.filter(user_id=ONE, album=other).count() == 0
    request.getfixturevalue("nothing_is_compiled")
    assert queries(read) == 0
    assert comparable_value(read()) == comparable_value(expected)


def test_another_version_of_the_model(
    photos: list[CachedPhoto], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = partial(READS["a page"], photos)
    for _ in range(4):
        read()
    fingerprint = cached_model.fingerprint
    try:
        with monkeypatch.context() as patch:
            patch.setattr(cached_model, "fingerprint", lambda model: fingerprint(model)[::-1])
            cached_model.forget()
            assert queries(read) == 1
            for _ in range(4):
                read()
            assert queries(read) == 0
    finally:
        cached_model.forget()


def test_text_keys(clock: Clock, db_all: None) -> None:
    keys = ["a b", "%s", "\0x"[1:], "é'\"\\"]
    for key in keys:
        CachedNote.objects.create(slug=key, account=key, folder=key, text=key)
    for _ in range(2):
        for key in keys * 2:
            rows = CachedNote.objects.filter(account=key, folder=key)
            assert [note.text for note in rows] == [key]
            assert CachedNote.objects.get(account=key, slug=key).text == key
        clock.ahead += LATER


def test_an_or_of_one_condition(photos: list[CachedPhoto]) -> None:
    """Django joins it to the others by AND, so the query names two objects, or one twice."""
    first, second = photos[:2]
    for _ in range(5):
        for one in (first, second):
            for other in (first, second):
                rows = CachedPhoto.objects.filter(
                    Q(pk=other.pk, _connector=Q.OR), user_id=ONE, pk=one.pk
                )
                assert list(rows) == ([one] if one == other else [])


# -- Random chains: plans off and on ------------------------------------------------------

VALUES: dict[str, list[Any]] = {
    "user_id": [ONE, TWO],
    "pk": [-1, 2**70, "x"],
    "album_id": [None, 1, "1"],
    "album": [None, 1, 2],
    "stars": [1, True, "2", 2**40, 1.5, None],
    "stars__gt": [0, 2, 2**70],
    "stars__in": [[1, 2], (3,), {0, 4}, [1, None], [], [2, 2], ["1", "3"]],
    "title": ["p1", "%s", "", 1],
    "title__in": [["p1", "p2"], ["%d"]],
    "title__contains": ["p"],
    "posted_at__lte": [START, START + timedelta(minutes=2), None],
    "posted_at__isnull": [True, False],
    "price": [1, "1.5"],
}
ALIASES = [SHARD[ONE], SHARD[ONE], SHARD[TWO], "photos", "default", "nowhere", None]
ENDS: list[Callable[[Any], Any]] = [
    list, list, list, lambda rows: rows.count(), lambda rows: rows.exists(), lambda rows: rows.first(),
    lambda rows: rows.get(), lambda rows: list(rows.values_list("pk", flat=True)), lambda rows: list(rows.uncached()),
    lambda rows: rows.uncached().count(), lambda rows: list(rows.only("title")), lambda rows: list(rows.select_related("album")),
    lambda rows: list(rows.iterator()), lambda rows: list(rows.filter(Q(stars=1) | Q(stars=2))),
    together, lambda rows: together(rows, rows.filter(stars=1)),
]  # fmt: skip


def chain(dice: Random, state: Any, pks: list[int]) -> Any:
    """Run a random chain of calls, the same for each run with one state of the dice."""
    dice.setstate(state)
    rows: Any = CachedPhoto.objects
    if dice.randrange(100) < 90:
        rows = rows.filter(user_id=ONE)
    for _ in range(dice.randrange(3)):
        if dice.randrange(100) < 15:
            rows = rows.using(dice.choice(ALIASES))
        names = dice.sample(list(VALUES), dice.randrange(1, 3))
        conditions = {name: dice.choice([*VALUES[name]]) for name in names}
        if "pk" in conditions and dice.randrange(100) < 70:
            conditions["pk"] = dice.choice(pks)
        if conditions.get("album") == 1:
            conditions["album"] = CachedAlbum(pk=1, user_id=dice.choice([ONE, ONE, TWO]))
        rows = (rows.filter if dice.randrange(100) < 70 else rows.exclude)(**conditions)
    if dice.randrange(100) < 10:
        rows = rows.filter(condition(dice))
    if dice.randrange(100) < 30:
        return rows.get(**dice.choice([{"pk": dice.choice(pks)}, {"stars": dice.randrange(5)}]))
    if dice.randrange(100) < 50:
        rows = rows.order_by(dice.choice(["pk", "-stars", "title", "album__title"]), "-pk")
    if dice.randrange(100) < 10:
        rows = rows.using(dice.choice(ALIASES))
    if dice.randrange(100) < 30:
        start = dice.randrange(3)
        rows = rows.all()[start : start + dice.randrange(1, 4)]
    return dice.choice(ENDS)(rows.all())


def outcome(call: Read) -> tuple[Any, list[str], int]:
    """Return the result or the error of ``call``, its statements, and its round trips to the cache."""
    (server,) = cache().servers
    before = server.round_trips
    with CaptureQueriesContext(connections[SHARD[ONE]]) as sent:
        try:
            value = comparable_value(call())
        except Exception as exc:
            value = (type(exc), str(exc))
    # The name of a cursor on the server has a number that counts up.
    statements = [re.sub(r"_django_curs\w+", "cursor", query["sql"]) for query in sent]
    return value, statements, server.round_trips - before


def outcomes(read: Read, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the outcomes of a read while its entries are made, and again after they became void."""
    # A reader that remembers nothing.
    monkeypatch.setattr(queryset, "_reader", Reader(cache(), clock))
    results = []
    for times in (4, 3):
        CachedPhoto.cache.invalidate()
        results += [outcome(read) for _ in range(times)]
    return results


def test_random_chains(
    photos: list[CachedPhoto],
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
) -> None:
    pks = [photo.pk for photo in photos]

    @as_many(60, pytestconfig)
    @given(st.randoms(use_true_random=False, note_method_calls=True))
    def same(dice: Random) -> None:
        first_recordings.forget()
        read = partial(chain, dice, dice.getstate(), pks)
        with without_plans():
            outcome(read)  # Makes missing guards. Then their quarantine is over.
            clock.ahead += LATER
            expected = outcomes(read, clock, monkeypatch)
        assert outcomes(read, clock, monkeypatch) == expected

    same()


# -- Ablations -----------------------------------------------------------------------------


def without_limits(patch: pytest.MonkeyPatch) -> None:
    known = RequestPlan._text_of
    patch.setattr(
        RequestPlan,
        "_text_of",
        lambda self, values, limits, alias: known(self, values, None, alias),
    )


def without_values(patch: pytest.MonkeyPatch) -> None:
    known = RequestPlan._text_of
    patch.setattr(
        RequestPlan, "_text_of",
        lambda self, values, limits, alias: known(self, [values[0]] * len(values), limits, alias),
    )  # fmt: skip


def without_offset(patch: pytest.MonkeyPatch) -> None:
    known = RequestPlan.prepare
    patch.setattr(
        RequestPlan, "prepare",
        lambda self, rows, values, limits, *others: known(self, rows, values, limits and (0, 9), *others),
    )  # fmt: skip


@pytest.mark.parametrize("is_removed", [False, True])
@pytest.mark.parametrize(
    ("remove", "reads"),
    [
        (
            without_limits,
            [lambda rows, pk: list(rows[:2]), lambda rows, pk: list(rows[:3])],
        ),
        (
            without_values,
            [
                lambda rows, pk: rows.filter(stars__gt=1).count(),
                lambda rows, pk: rows.filter(stars__gt=3).count(),
            ],
        ),
        (
            without_offset,
            [
                lambda rows, pk: list(rows.filter(pk=pk)[:1]),
                lambda rows, pk: list(rows.filter(pk=pk)[1:2]),
            ],
        ),
    ],
)
def test_a_part_of_a_request(
    remove: Callable[[pytest.MonkeyPatch], None],
    reads: list[Callable[[Any, int], Any]],
    is_removed: bool,
    photos: list[CachedPhoto],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the part, a read gets the entry of another one."""

    def results() -> list[Any]:
        rows = CachedPhoto.objects.filter(user_id=ONE)
        return [comparable_value(read(rows.order_by("pk"), photos[0].pk)) for read in reads]

    with without_plans():
        expected = results()
    first_recordings.forget()
    CachedPhoto.cache.invalidate()
    if is_removed:
        remove(monkeypatch)
    try:
        assert ([results() for _ in range(4)] != [expected] * 4) is is_removed
    finally:
        first_recordings.forget()
