"""The request cache (level 1): rows that one request or task has read already."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core.handlers.asgi import ASGIHandler
from django.core.signals import request_finished, request_started
from django.db import transaction
from django.http import HttpResponse
from django.test import override_settings
from django.urls import path

from sharded_orm.cache import request_cache
from sharded_orm.cache.request_cache import cache_scope
from tests.cached.models import CachedNote, CachedPhoto, CachedTag
from tests.patience import PATIENCE
from tests.queries.conftest import DATABASES, ONE, SHARD, cache

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.long_on("mysql"),
    pytest.mark.django_db(transaction=True, databases=DATABASES),
]


def round_trips(run: Callable[[], Any]) -> int:
    server = cache().objects(SHARD[ONE])
    before = server.round_trips
    run()
    return server.round_trips - before


@pytest.fixture
def reads(photos) -> list[Callable[[], Any]]:
    rows = CachedPhoto.objects.filter(user_id=ONE)
    found: list[Callable[[], Any]] = [
        lambda: CachedPhoto.objects.get(user_id=ONE, pk=photos[4].pk),
        lambda: list(rows.filter(stars__lt=3)),
        lambda: list(rows.filter(stars=77)),
        lambda: rows.count(),
        lambda: rows.filter(stars=77).exists(),
    ]
    for read in found:
        read()
    return found


def test_the_second_use_asks_nobody(reads):
    with cache_scope():
        first = [read() for read in reads]
        for read, said in zip(reads, first, strict=True):
            again: list[Any] = []
            assert round_trips(lambda read=read, again=again: again.append(read())) == 0
            assert again == [said]


def test_what_was_missing_is_kept_as_well(photos):
    with cache_scope():
        CachedPhoto.objects.get(user_id=ONE, pk=photos[0].pk)
        list(CachedPhoto.objects.filter(user_id=ONE, stars__gt=1))
        assert round_trips(lambda: CachedPhoto.objects.get(user_id=ONE, pk=photos[0].pk)) == 0
        assert round_trips(lambda: list(CachedPhoto.objects.filter(user_id=ONE, stars__gt=1))) == 0


def test_a_row_of_a_list_is_an_object(reads, photos):
    with cache_scope():
        list(CachedPhoto.objects.filter(user_id=ONE, stars__lt=3))
        assert round_trips(lambda: CachedPhoto.objects.get(user_id=ONE, pk=photos[1].pk)) == 0


def test_it_is_off_outside(reads):
    for read in reads:
        assert round_trips(read) > 0
        assert round_trips(read) > 0
    with cache_scope():
        reads[0]()
    assert round_trips(reads[0]) > 0


def test_instances_are_independent(reads, photos):
    with cache_scope():
        for _ in range(3):
            photo = CachedPhoto.objects.get(user_id=ONE, pk=photos[1].pk)
            assert photo.title == "p1"
            photo.title = "changed"
            for row in CachedPhoto.objects.filter(user_id=ONE, stars__lt=3):
                assert row.title.startswith("p")
                row.title = "changed"


def test_own_writes_are_seen(reads, photos):
    photo = photos[4]
    with cache_scope():
        reads[0](), reads[1]()
        photo.title = "new"
        photo.stars = 0
        photo.save()
        assert reads[0]().title == "new"
        assert photo in reads[1]()
        with cache_scope():
            photo.title = "newer"
            photo.save()
        assert reads[0]().title == "newer"


def test_what_is_not_there_is_not_there_again(photos):
    with cache_scope():
        for _ in range(3):
            with pytest.raises(CachedPhoto.DoesNotExist, match="CachedPhoto matching query"):
                CachedPhoto.objects.get(user_id=ONE, pk=10**9)
        assert CachedPhoto.objects.filter(user_id=ONE, pk=10**9).first() is None


def elsewhere(run: Callable[[], Any]) -> None:
    """Run as in another request."""
    contextvars.Context().run(run)


def test_deleting_asks_again(photos):
    rows = CachedPhoto.objects.filter(user_id=ONE, title="p0")
    with cache_scope():
        assert list(rows) == photos[:1]
        elsewhere(lambda: CachedPhoto.objects.filter(user_id=ONE, stars=1).update(title="p0"))
        assert list(rows.all()) == photos[:1]
        rows.all().delete()
    assert not CachedPhoto.objects.uncached().filter(user_id=ONE, title="p0").exists()


def test_creating_what_is_missing_asks_again(photos):
    names = {"user_id": ONE, "name": "t"}
    with cache_scope():
        with pytest.raises(CachedTag.DoesNotExist):
            CachedTag.objects.get(**names)
        elsewhere(lambda: CachedTag.objects.create(**names))
        _, made = CachedTag.objects.get_or_create(**names)
    assert not made


@pytest.mark.parametrize("rows", [CachedPhoto.objects.all(), CachedPhoto.objects.uncached()])
def test_locking_forgets(reads, photos, rows):
    with cache_scope():
        reads[0]()
        with transaction.atomic(using=SHARD[ONE]):
            rows.select_for_update().get(user_id=ONE, pk=photos[4].pk)
        assert round_trips(reads[0]) == 1


def test_it_is_bounded(reads, monkeypatch):
    monkeypatch.setattr(request_cache, "MAX_ENTRIES", 3)
    with cache_scope():
        for _ in range(5):
            for read in reads:
                read()
        level = request_cache.current()
        assert level is not None
        assert sum(map(len, level._homes.values())) <= 12


def test_keys_of_which_nothing_is_kept_are_bounded(photos, monkeypatch):
    monkeypatch.setattr(request_cache, "MAX_ENTRIES", 3)
    with cache_scope():
        for number in range(8):
            # This read creates its guards.
            CachedNote.objects.filter(account=f"n{number}", slug="nothing").first()
        level = request_cache.current()
        assert level is not None
        assert len(level._homes) <= 4


class TestRequests:
    def test_a_worker_serves_two(self, reads):
        for _ in range(2):
            request_started.send(sender=object)
            assert round_trips(reads[0]) == 1
            assert round_trips(reads[0]) == 0
            request_finished.send(sender=object)
            assert request_cache.current() is None

    def test_an_exception_in_between(self, reads):
        # A program that never signals the end of a request.
        request_started.send(sender=object)
        reads[0]()
        request_started.send(sender=object)
        assert round_trips(reads[0]) == 1
        request_finished.send(sender=object)
        assert request_cache.current() is None

    def test_inside_of_a_block(self, reads):
        with cache_scope():
            reads[0]()
            request_started.send(sender=object)
            assert round_trips(reads[0]) == 1
            request_finished.send(sender=object)
            assert round_trips(reads[0]) == 0

    def test_threads_have_their_own(self, reads):
        barrier = threading.Barrier(2)
        seen: list[Any] = []

        def serve() -> None:
            request_started.send(sender=object)
            seen.append(request_cache.current())
            barrier.wait(PATIENCE)
            request_finished.send(sender=object)
            seen.append(request_cache.current())

        threads = [threading.Thread(target=serve) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen[0] is not seen[1]
        assert seen[2:] == [None, None]

    def test_a_task_that_outlives_the_request(self, reads):
        request_started.send(sender=object)
        reads[0]()
        context = contextvars.copy_context()
        request_finished.send(sender=object)
        assert context.run(request_cache.current) is None
        assert context.run(round_trips, reads[0]) == 1


# -- ASGI ----------------------------------------------------------------------------

_meeting: dict[str, Any] = {}


async def _view(request: Any) -> HttpResponse:
    mine = request_cache.current()
    _meeting.setdefault("levels", []).append(mine)
    await _meeting["barrier"]()
    assert request_cache.current() is mine
    inside = await sync_to_async(request_cache.current)()
    await asyncio.gather(*(_task(mine) for _ in range(2)))
    return HttpResponse(str(mine is not None and inside is mine))


async def _task(mine: Any) -> None:
    assert request_cache.current() is mine


urlpatterns = [path("", _view)]


async def _request(application: Any) -> bytes:
    scope = {
        "type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": [],
        "http_version": "1.1", "server": ("testserver", 80),
    }  # fmt: skip
    sent: list[Any] = []
    messages = [{"type": "http.request", "body": b""}]
    never = asyncio.Event()

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await never.wait()

    async def send(message: Any) -> None:
        sent.append(message)

    await application(scope, receive, send)
    return b"".join(message.get("body", b"") for message in sent)


@override_settings(ROOT_URLCONF=__name__, MIDDLEWARE=[], ALLOWED_HOSTS=["*"])
def test_asgi_requests_have_their_own(photos):
    async def run() -> list[bytes]:
        arrived, all_there = 0, asyncio.Event()

        async def barrier() -> None:
            nonlocal arrived
            arrived += 1
            if arrived == 3:
                all_there.set()
            await all_there.wait()

        _meeting.clear()
        _meeting["barrier"] = barrier
        application = ASGIHandler()
        return await asyncio.gather(*(_request(application) for _ in range(3)))

    assert asyncio.run(run()) == [b"True"] * 3
    levels = _meeting["levels"]
    assert len(set(map(id, levels))) == 3
    assert all(level.is_closed for level in levels)
