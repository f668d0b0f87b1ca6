"""save() of a loaded row of a cached model: one statement, and nothing stale, whatever goes wrong."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from django.conf import settings
from django.db import DatabaseError, IntegrityError, connections, transaction
from django.db.models import signals
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from sharded_orm import runtime
from sharded_orm.cache.guards import Writer
from sharded_orm.cache.stores.base import ServerDown
from sharded_orm.exceptions import CacheUnavailable
from sharded_orm.models.querysets.plans import without_plans
from tests.cached.models import CachedAlbum, CachedPhoto, CachedTag
from tests.integration.cache.interleaving import (
    USER,
    InterleavingHarness,
    WorkerThread,
    Writes,
    all_titles,
    learn_saves,
    rename,
    title,
    titles,
)
from tests.patience import PATIENCE

SHARD = 3
ALIAS = f"photos_{SHARD:05d}"
ALBUM, OTHER = 10, 20

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(
        databases=["default", "directory", "tickets_1", "tickets_2", "photos"], transaction=True
    ),
]


@pytest.fixture
def harness(
    transactional_db: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[InterleavingHarness]:
    backend = "django.core.cache.backends.locmem.LocMemCache"
    own = {"local": {"BACKEND": backend, "LOCATION": uuid.uuid4().hex}}
    cache = {**settings.SHARDED_ORM["CACHE"], "OBJECTS": "local", "LISTS": "local"}
    with override_settings(
        CACHES={**settings.CACHES, **own}, SHARDED_ORM={**settings.SHARDED_ORM, "CACHE": cache}
    ):
        store = runtime.strategy("photos").store  # type: ignore[attr-defined]
        store.place("photos", {str(USER): SHARD})
        CachedAlbum.objects.bulk_create(CachedAlbum(pk=pk, user_id=USER) for pk in (ALBUM, OTHER))
        harness = InterleavingHarness(ALIAS)
        learn_saves()
        monkeypatch.setattr(Writes, "by_save", True)
        harness.install(monkeypatch)
        yield harness


def loaded(pk: int) -> Any:
    return CachedPhoto.objects.uncached().get(user_id=USER, photo_id=pk)


def sent(act: Callable[[], object]) -> list[str]:
    """Return the first words of the statements that ``act`` sends, transactions included."""
    with CaptureQueriesContext(connections[ALIAS]) as queries:
        act()
    return [query["sql"].split()[0] for query in queries.captured_queries]


def is_alone() -> bool:
    """Whether a save() needs no transaction of its own."""
    return connections[ALIAS].limits_statements  # type: ignore[no-any-return, attr-defined]


@pytest.mark.parametrize("album", [None, ALBUM])
def test_one_statement_and_no_transaction(harness: InterleavingHarness, album: int | None) -> None:
    photo = loaded(harness.photo("old", album))
    harness.warm(lambda: title(photo.pk), lambda: titles(album))
    for how in ({}, {"update_fields": ["title"]}):
        photo.title += "!"
        harness.calls.clear()
        expected = ["UPDATE"] if is_alone() else ["BEGIN", "UPDATE", "COMMIT"]
        assert sent(lambda how=how: photo.save(**how)) == expected
        assert harness.calls == ["mark", "finish"]
        assert not harness.open_markers(album)
        harness.check(lambda: title(photo.pk), photo.title)
        harness.check_cached_again(lambda: titles(album), [photo.title])
    with transaction.atomic(using=ALIAS):
        photo.title = "in a transaction"
        harness.calls.clear()
        assert sent(photo.save) == ["UPDATE"]
        assert harness.calls == []
    harness.check_cached_again(lambda: title(photo.pk), "in a transaction")


@pytest.mark.parametrize("planned", [True, False])
def test_a_row_that_is_not_as_the_instance_says(
    harness: InterleavingHarness, planned: bool
) -> None:
    pk = harness.photo("old", ALBUM)
    harness.warm(lambda: title(pk), lambda: titles(ALBUM), lambda: titles(OTHER))
    with nullcontext() if planned else without_plans():
        photo = loaded(pk)
        photo.album_id = OTHER
        photo.save()
        harness.check(lambda: titles(ALBUM), [])
        harness.check(lambda: titles(OTHER), ["old"])
        # The instance does not know that the row is in another album again.
        CachedPhoto.objects.filter(user_id=USER, photo_id=pk).update(album_id=ALBUM)
        harness.warm(lambda: titles(ALBUM), lambda: titles(OTHER), lambda: title(pk))
        photo.title = "renamed"
        photo.save(update_fields=["title"])
        harness.check(lambda: titles(ALBUM), ["renamed"])
        harness.check(lambda: titles(OTHER), [])
        harness.check(lambda: title(pk), "renamed")
        CachedPhoto.objects.filter(user_id=USER, photo_id=pk).delete()
        with pytest.raises(DatabaseError):
            photo.save(force_update=True)
    assert not harness.open_markers(ALBUM, OTHER)


@pytest.mark.parametrize("change", ["nothing", "isolate key", "deleted"])
def test_the_same_statements_as_if_signals_were_received(
    harness: InterleavingHarness, change: str
) -> None:
    """Without receivers, most of Django's steps are left out, but no statement is, and none is added."""

    def statements() -> list[str]:
        photo = loaded(harness.photo("old", ALBUM))
        photo.title = "new"
        if change == "isolate key":
            photo.album_id = OTHER
        elif change == "deleted":
            CachedPhoto.objects.filter(user_id=USER, photo_id=photo.pk).delete()
        with CaptureQueriesContext(connections[ALIAS]) as queries:
            photo.save()
        assert (loaded(photo.pk).title, photo._state.db) == ("new", ALIAS)
        return [
            re.sub(rf"\b{photo.pk}\b", "pk", query["sql"]) for query in queries.captured_queries
        ]

    def receive(**kwargs: Any) -> None:
        received.append(kwargs["instance"])

    received: list[Any] = []
    expected = statements()
    signals.post_save.connect(receive, sender=CachedPhoto)
    try:
        assert statements() == expected
    finally:
        signals.post_save.disconnect(receive, sender=CachedPhoto)
    assert len(received) == 2  # creating the row, and saving it
    assert expected[0].startswith("UPDATE" if is_alone() else "BEGIN")


def test_a_statement_that_is_refused(harness: InterleavingHarness) -> None:
    first, second = (CachedTag.objects.create(user_id=USER, name=name) for name in "ab")
    for _ in range(3):
        second.save(update_fields=["name"])
    second.name = "a"
    harness.lines.clear()
    with pytest.raises(IntegrityError):
        second.save(update_fields=["name"])
    assert_closed(harness)
    assert CachedTag.objects.get(user_id=USER, pk=second.pk).name == "b"
    assert first.name == "a"


def assert_closed(harness: InterleavingHarness) -> None:
    opened = {line[1:17] for line in harness.lines if line[:1] == b"+"}
    assert opened == {line[1:17] for line in harness.lines if line[:1] in b"-!"}


def test_a_cache_that_does_not_answer(harness: InterleavingHarness) -> None:
    pk = harness.photo("old")
    harness.warm(lambda: title(pk))

    def down(call: Any, *args: Any) -> Any:
        raise ServerDown("test")

    with harness.instead("mark", down), pytest.raises(CacheUnavailable):
        rename(pk)
    assert loaded(pk).title == "old"
    rename(pk)
    harness.check(lambda: title(pk), "new")


def test_a_row_that_another_transaction_has_locked(
    harness: InterleavingHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The statement is broken off, and sent again in a transaction, which waits."""
    if not is_alone():
        return  # One writer at a time.
    cache = runtime.cache()
    assert cache is not None
    pk = harness.photo("old")
    harness.warm(lambda: title(pk), all_titles)
    harness.lines.clear()
    with transaction.atomic(using=ALIAS):
        list(CachedPhoto.objects.select_for_update().filter(user_id=USER, photo_id=pk))
        # It marks, waits for the lock, gives up, and closes; then it waits in its transaction.
        writer, closes = harness.begin(lambda: rename(pk), ("before", "finish"))
        closes.wait()
        harness.check(lambda: title(pk), "old")
        closes.release()
        CachedPhoto.objects.filter(user_id=USER, photo_id=pk).update(stars=5)
    writer.join()
    assert_closed(harness)
    harness.check_cached_again(lambda: title(pk), "new")
    harness.check_cached_again(all_titles, ["new"])
    assert loaded(pk).stars == 5


@pytest.mark.parametrize("seconds", [0.2, 60])
def test_a_shorter_limit_of_the_session_stays(harness: InterleavingHarness, seconds: float) -> None:
    """The statement takes longer than the limit of the session, or than that of save()."""
    if not is_alone():
        return
    connection: Any = connections[ALIAS]
    pk = harness.photo("old")
    is_postgresql = connection.vendor == "postgresql"
    sleep = "pg_sleep(0.6)::text = ''" if is_postgresql else "SLEEP(0.6) = 0"
    update = f"UPDATE {CachedPhoto._meta.db_table} SET title = %s WHERE photo_id = %s AND {sleep}"
    with connection.limited_session(0.4 if seconds == 60 else 20) as is_limited:
        assert is_limited
        session = connection.connection.session
        if is_postgresql:
            session.run(f"SET statement_timeout = {round(seconds * 1000)}".encode())
        else:
            session.run(f"SET max_statement_time = {seconds}".encode())
        try:
            with pytest.raises(DatabaseError) as caught, connection.cursor() as cursor:
                cursor.execute(update, ["new", pk])
            assert connection.is_statement_limit(caught.value)
        finally:
            default = b"RESET statement_timeout" if is_postgresql else b"SET max_statement_time = 0"
            session.run(default)
    assert loaded(pk).title == "old"


def test_a_shard_that_moves_after_the_announcement(harness: InterleavingHarness) -> None:
    """The statement does not wait for the move, because its marker would become too old."""
    if not is_alone():
        return
    pk = harness.photo("old")
    harness.warm(lambda: title(pk), all_titles)
    photo = loaded(pk)
    photo.title = "new"

    def hide() -> None:
        with connections[ALIAS].schema_move(lambda: None) as schema:  # type: ignore[attr-defined]
            schema.hide(schema.tables(), "tag", PATIENCE)

    def show() -> None:
        with connections[ALIAS].schema_move(lambda: None) as schema:  # type: ignore[attr-defined]
            schema.show(PATIENCE)

    harness.at("after", "announce", lambda: _in_thread(hide))
    harness.at("before", "finish", lambda: _in_thread(show))
    harness.lines.clear()
    photo.save(update_fields=["title"])
    assert_closed(harness)
    # It was announced twice, and both announcements were closed in time.
    assert {line[:1] for line in harness.lines} == {b"+", b"-"}
    assert len({line[1:17] for line in harness.lines}) == 2
    harness.check_cached_again(lambda: title(pk), "new")


def test_a_commit_that_is_answered_late(harness: InterleavingHarness) -> None:
    """Closing gives the guard a new generation: all that was stored meanwhile is void."""
    pk = harness.photo("old")
    harness.warm(lambda: title(pk), all_titles)
    harness.lines.clear()
    writer, marked = harness.begin(lambda: rename(pk), ("after", "announce"))
    marked.wait()
    harness.clock.advance(3)
    marked.release()
    writer.join()
    assert {line[:1] for line in harness.lines} == {b"+", b"!"}
    assert_closed(harness)
    harness.check_cached_again(lambda: title(pk), "new")


def test_a_late_closing_is_waited_for(harness: InterleavingHarness) -> None:
    """The marker may be closed already, and old rows be stored. They must be void before save() returns."""
    pk = harness.photo("old")
    harness.warm(lambda: title(pk))
    waits: list[bool] = []

    def finish(call: Any, objects: Any, records: Any, lost: Any = None) -> Any:
        waits.append(lost is None)
        return call(objects, records, lost)

    with harness.instead("finish", finish):
        rename(pk)
        harness.at("after", "announce", lambda: harness.clock.advance(3))
        rename(pk, "newer")
    assert waits == [False, True]
    harness.check_cached_again(lambda: title(pk), "newer")


def test_the_closing_of_a_long_guard_is_not_waited_for(harness: InterleavingHarness) -> None:
    """The guard becomes short all the same, and no marker stays open in it."""
    pk = harness.photo("old")
    harness.warm(lambda: title(pk))
    waits: list[bool] = []
    shortened: list[bool] = []

    def finish(call: Any, objects: Any, records: Any, lost: Any = None) -> Any:
        waits.append(lost is None)
        return call(objects, records, lost)

    def replace(call: Any, *args: Any) -> Any:
        shortened.append(call(*args))
        return shortened[-1]

    with harness.instead("finish", finish), harness.instead("replace", replace):
        for number in range(100):
            rename(pk, f"new {number}")
            if shortened:
                break
    assert shortened
    assert all(shortened)
    assert True not in waits
    assert_closed(harness)
    harness.check_cached_again(lambda: title(pk), f"new {number}")


def test_an_announcement_that_takes_too_long(harness: InterleavingHarness) -> None:
    """The statement is not sent in autocommit: its commit could begin too late."""
    pk = harness.photo("old")
    harness.warm(lambda: title(pk), all_titles)
    photo = loaded(pk)
    photo.title = "new"
    delays = [1.5]

    def slow(call: Any, *args: Any) -> Any:
        result = call(*args)
        if delays:
            harness.clock.advance(delays.pop())
        return result

    with harness.instead("mark", slow):
        assert sent(lambda: photo.save(update_fields=["title"]))[-2:] == ["UPDATE", "COMMIT"]
    assert_closed(harness)
    harness.check_cached_again(lambda: title(pk), "new")


@pytest.mark.parametrize("when", ["before the statement", "after it"])
def test_a_session_that_is_lost(harness: InterleavingHarness, when: str) -> None:
    """Nobody knows whether the statement was executed, so its markers stay until readers repair."""
    if not is_alone():
        return
    pk = harness.photo("old")
    harness.warm(lambda: title(pk), all_titles)

    def kill() -> None:
        (session,) = {marker.writer for marker in harness.open_markers()}
        with connections["default"].cursor() as cursor:
            if connections[ALIAS].vendor == "postgresql":
                cursor.execute(
                    f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid & 1048575 ="
                    f" {session.connection & 1048575}"
                )
            else:
                cursor.execute(f"KILL {session.connection}")

    def write() -> None:
        if when == "before the statement":
            harness.at("after", "announce", kill)
            rename(pk)
        else:
            with connections[ALIAS].execute_wrapper(lose_answer):
                rename(pk)

    def lose_answer(execute: Any, sql: str, *args: Any) -> Any:
        result = execute(sql, *args)
        if sql.startswith("UPDATE"):
            # As if the answer had never come: the driver's session is gone.
            session = connections[ALIAS].connection.session
            connections[ALIAS].connection.session = None
            session.user = None
            connections[ALIAS].connection.pool.discard(session)
            raise DatabaseError("the answer is lost")
        return result

    with pytest.raises(DatabaseError):
        _in_thread(write)
    expected = "old" if when == "before the statement" else "new"
    harness.check(lambda: title(pk), expected)
    harness.check(all_titles, [expected])
    harness.check_cached_again(lambda: title(pk), expected)
    assert not harness.open_markers()


def test_a_write_inside_of_the_statement_while_the_cache_is_down(
    harness: InterleavingHarness,
) -> None:
    """Code of the project writes another row before the statement is sent, and its closing fails."""
    if not is_alone():
        return
    pk, other = harness.photos(2)
    harness.warm(lambda: title(pk), lambda: title(other), all_titles)
    sessions: list[Any] = []

    def down(call: Any, *args: Any, **kwargs: Any) -> Any:
        raise ServerDown("test")

    def writes_other_row(execute: Any, sql: str, *args: Any) -> Any:
        if not sql.startswith("UPDATE") or sessions:
            return execute(sql, *args)
        (marker,) = {marker.writer for marker in harness.open_markers()}
        sessions.append(marker)
        with harness.instead("mark", down), harness.instead("finish", down):
            with pytest.raises(CacheUnavailable):
                CachedPhoto.objects.filter(user_id=USER, photo_id=other).update(stars=5)
        _in_thread(lambda: harness.check(all_titles, ["old", "old"]))
        result = execute(sql, *args)
        sessions.append(Writer(*connections[ALIAS].session_id()))  # type: ignore[attr-defined]
        return result

    photo = loaded(pk)
    photo.title = "new"
    with connections[ALIAS].execute_wrapper(writes_other_row):
        photo.save(update_fields=["title"])
    # Readers look for the session that the marker names. It has run the statement.
    assert sessions[0] == sessions[1]
    harness.check_cached_again(lambda: title(pk), "new")
    harness.check_cached_again(all_titles, ["new", "old"])


def _in_thread(work: Callable[[], Any]) -> None:
    worker = WorkerThread(work)
    worker.thread.start()
    worker.join()
