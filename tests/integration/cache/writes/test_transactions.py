"""Markers before COMMIT, after it, and when something fails in between."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from django.db import IntegrityError, OperationalError, connections, transaction

from sharded_orm.cache import markers
from sharded_orm.cache.closings import closing_queue
from sharded_orm.cache.guards import Guard
from sharded_orm.exceptions import CacheUnavailable
from tests.cached.models import CachedCountry, CachedTag
from tests.queries.conftest import DATABASES

from .conftest import NEAR, ONE, SHARD, TWO, make
from .recording import Recorded, Recorder
from .test_scopes import objects, scope

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.long_on("mysql", "postgresql"),
    pytest.mark.django_db(transaction=True, databases=DATABASES),
]


def committed(key: int) -> int:
    """Return how many tags another connection sees."""
    found: list[int] = []

    def look() -> None:
        try:
            found.append(CachedTag.objects.filter(user_id=key).uncached().count())
        finally:
            connections["photos"].close()

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0]


def guard_of(recorded: Recorded, key: int) -> Guard:
    found = recorded.guard(scope(CachedTag, key))
    assert found is not None
    return found


def only(recorded: Recorded) -> Recorder:
    (server,) = recorded.servers
    return server


def test_marked_before_commit_and_closed_before_hooks(local: Recorded) -> None:
    seen: list[Any] = []
    server = only(local)
    server.at["mark"] = lambda: seen.append(("mark", committed(ONE)))
    server.at["finish"] = lambda: seen.append(
        ("finish", committed(ONE), len(guard_of(local, ONE).open))
    )
    with transaction.atomic(using=SHARD[ONE]):
        tag = CachedTag.objects.create(user_id=ONE, name="sea")
        transaction.on_commit(
            lambda: seen.append(("hook", len(guard_of(local, ONE).open))), using=SHARD[ONE]
        )
        tag.uses = 1
        tag.save()
    assert seen == [("mark", 0), ("finish", 1, 1), ("hook", 0)]


def test_a_group_marks_all_shards_before_the_first_commits(recorded: Recorded) -> None:
    seen: list[Any] = []
    server = only(recorded)
    server.at["mark"] = lambda: seen.append((committed(ONE), committed(TWO)))
    with transaction.atomic(using="photos"):
        CachedTag.objects.create(user_id=ONE, name="sea")
        CachedTag.objects.create(user_id=TWO, name="sea")
    assert seen == [(0, 0), (0, 0)]
    assert sorted(recorded.what) == ["finish", "finish", "mark", "mark"]
    assert (committed(ONE), committed(TWO)) == (1, 1)


def test_a_group_is_refused_as_a_whole(local: Recorded) -> None:
    server = only(local)

    def second() -> None:
        server.fail.add("mark")

    with pytest.raises(CacheUnavailable), transaction.atomic(using="photos"):
        CachedTag.objects.create(user_id=ONE, name="sea")
        CachedTag.objects.create(user_id=TWO, name="sea")
        server.at["mark"] = lambda: server.at.update(mark=second)
    assert (committed(ONE), committed(TWO)) == (0, 0)
    assert guard_of(local, ONE).open == ()


@pytest.mark.parametrize("how", ["mark", "mark+"])
def test_refused(local: Recorded, how: str) -> None:
    CachedTag.objects.create(user_id=ONE, name="first")
    server = only(local)
    server.fail = {how, "finish"}
    with pytest.raises(CacheUnavailable, match=r"photos_00003.*ON_CACHE_FAILURE"):
        CachedTag.objects.create(user_id=ONE, name="second")
    assert committed(ONE) == 1
    assert local.cache.statistics.counted(scope(CachedTag, ONE).type.name)["refusals"] == 1
    # The mark may have arrived; it is closed as soon as the server answers.
    assert len(guard_of(local, ONE).open) == (how == "mark+")
    assert closing_queue.waiting
    server.fail = set()
    CachedTag.objects.create(user_id=ONE, name="third")
    assert guard_of(local, ONE).open == ()
    assert not closing_queue.waiting


def test_refused_inside_a_block_rolls_back_all_of_it(local: Recorded) -> None:
    only(local).fail = {"mark"}
    with pytest.raises(CacheUnavailable), transaction.atomic(using="default"):
        CachedCountry.objects.create(name="A")
    only(local).fail = set()
    assert CachedCountry.objects.uncached().count() == 0
    # The connection goes on.
    CachedCountry.objects.create(name="A")


def test_proceeds(
    local_entry: dict[str, Any], placed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for recorded in make({"default": local_entry}, monkeypatch, on_failure="proceed"):
        tag = CachedTag.objects.create(user_id=ONE, name="sea")
        before = guard_of(recorded, ONE)
        server = only(recorded)
        server.fail = {"mark", "finish"}
        tag.save()
        assert guard_of(recorded, ONE) == before
        assert recorded.cache.statistics.counted(scope(CachedTag, ONE).type.name)["proceeded"] == 1
        # When the server is back, everything of the key is invalidated before anything else is done
        # there.
        server.fail = set()
        recorded.clear()
        CachedTag.objects.create(user_id=NEAR, name="sea")
        assert recorded.what == ["finish", "mark", "finish"]
        assert objects(CachedTag, ONE, tag.pk) <= set(recorded.events[0][2])
        assert guard_of(recorded, ONE).generation != before.generation


def test_end_that_fails_is_told_later(local: Recorded) -> None:
    server = only(local)
    server.fail = {"finish"}
    tag = CachedTag.objects.create(user_id=ONE, name="sea")
    assert committed(ONE) == 1
    assert len(guard_of(local, ONE).open) == 1
    server.fail = set()
    closing_queue.flush(server)
    assert guard_of(local, ONE).open == ()
    server.fail = {"finish+"}  # the marker was closed, and is closed again
    tag.save()
    server.fail = set()
    closing_queue.flush(server)
    assert guard_of(local, ONE).open == ()


def test_queue_is_bounded(local: Recorded) -> None:
    server = only(local)
    for _ in range(closing_queue.MAXIMUM + 1):
        closing_queue.add(markers.Closing(server))
    assert len(closing_queue) == closing_queue.MAXIMUM


def test_queue_is_not_inherited(local: Recorded) -> None:
    closing_queue.add(markers.Closing(only(local)))
    child = os.fork()
    if not child:
        os._exit(len(closing_queue) + closing_queue.waiting)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert closing_queue.waiting


def test_invalidation_takes_part_in_the_transaction(local: Recorded) -> None:
    tag = CachedTag.objects.create(user_id=ONE, name="sea")
    local.clear()
    wrapper: Any = connections[SHARD[ONE]]
    with transaction.atomic(using=SHARD[ONE]):
        with wrapper.cursor() as cursor:
            cursor.execute(f"UPDATE {CachedTag._meta.db_table} SET uses = 5")
        CachedTag.cache.invalidate(user_id=ONE, pk=tag.pk)
        assert wrapper.wrote
        assert local.what == []
    assert local.what == ["mark", "finish"]
    assert objects(CachedTag, ONE, tag.pk) <= local.named("finish")


def test_marks_again_when_commit_comes_late(
    local: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    server = only(local)
    server.at["mark"] = lambda: clock.pass_by(3 if local.what.count("mark") == 1 else 0)
    CachedTag.objects.create(user_id=ONE, name="sea")
    assert local.what == ["mark", "mark", "finish"]
    assert guard_of(local, ONE).open == ()


def test_refuses_when_marking_is_too_slow(local: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    only(local).at["mark"] = lambda: clock.pass_by(3)
    with pytest.raises(CacheUnavailable, match="COMMIT_WITHIN"):
        CachedTag.objects.create(user_id=ONE, name="sea")
    assert committed(ONE) == 0
    assert guard_of(local, ONE).open == ()


def test_voids_when_commit_itself_was_late(
    local: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    CachedTag.objects.create(user_id=ONE, name="sea")
    before = guard_of(local, ONE)
    CachedTag.objects.create(user_id=ONE, name="lake")
    in_time = guard_of(local, ONE)
    assert in_time.generation == before.generation
    assert in_time.digest != before.digest
    clock = Clock(monkeypatch)
    only(local).at["finish"] = lambda: None
    wrapper: Any = connections[SHARD[ONE]]
    end_of_commit(monkeypatch, wrapper, lambda: clock.pass_by(3))
    CachedTag.objects.create(user_id=ONE, name="pond")
    assert guard_of(local, ONE).generation != before.generation


def test_interrupt_while_marking(local: Recorded) -> None:
    server = only(local)

    def interrupt() -> None:
        raise KeyboardInterrupt

    server.at["mark"] = interrupt
    with pytest.raises(KeyboardInterrupt):
        CachedTag.objects.create(user_id=ONE, name="sea")
    assert committed(ONE) == 0
    server.at.clear()
    CachedTag.objects.create(user_id=ONE, name="sea")
    assert guard_of(local, ONE).open == ()


@pytest.mark.parametrize("alias", [SHARD[ONE], "photos"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
def test_hooks_of_what_was_not_committed_are_forgotten(
    local: Recorded, alias: str, error: type[BaseException]
) -> None:
    """After errors other than database errors, Django would keep the hooks for the next commit."""
    server, called = only(local), []

    def interrupt() -> None:
        server.at.clear()
        raise error

    server.at["mark"] = interrupt
    with pytest.raises(error), transaction.atomic(using=alias):
        CachedTag.objects.create(user_id=ONE, name="sea")
        transaction.on_commit(lambda: called.append("sea"), using=alias)
    with transaction.atomic(using=alias):
        CachedTag.objects.create(user_id=ONE, name="lake")
        transaction.on_commit(lambda: called.append("lake"), using=alias)
    assert committed(ONE) == 1
    assert called == ["lake"]


def test_interrupt_after_commit(local: Recorded) -> None:
    server = only(local)

    def interrupt() -> None:
        server.at.clear()
        raise KeyboardInterrupt

    server.at["finish"] = interrupt
    with pytest.raises(KeyboardInterrupt):
        CachedTag.objects.create(user_id=ONE, name="sea")
    assert committed(ONE) == 1
    assert len(guard_of(local, ONE).open) == 1
    closing_queue.flush(server)
    assert guard_of(local, ONE).open == ()


def test_commit_that_fails_is_closed_by_its_rollback(
    local: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper: Any = connections[SHARD[ONE]]

    def fail() -> None:
        raise OperationalError("the database refuses this one")

    start_of_commit(monkeypatch, wrapper, fail)
    with pytest.raises(OperationalError, match="refuses"):
        CachedTag.objects.create(user_id=ONE, name="sea")
    assert local.what == ["mark", "finish"]
    assert guard_of(local, ONE).open == ()
    assert committed(ONE) == 0


def test_constraint_error_tells_nobody(local: Recorded) -> None:
    CachedTag.objects.create(user_id=ONE, name="sea")
    local.clear()
    with pytest.raises(IntegrityError):
        CachedTag.objects.create(user_id=ONE, name="sea")
    assert local.what == []


def test_savepoint_that_is_rolled_back(local: Recorded) -> None:
    with transaction.atomic(using=SHARD[ONE]):
        with pytest.raises(ZeroDivisionError), transaction.atomic(using=SHARD[ONE]):
            CachedTag.objects.create(user_id=ONE, name="sea")
            raise ZeroDivisionError
        assert local.what == []
    assert guard_of(local, ONE).open == ()


def test_manual_transactions(local: Recorded) -> None:
    wrapper: Any = connections[SHARD[ONE]]
    wrapper.set_autocommit(False)
    try:
        CachedTag.objects.create(user_id=ONE, name="a")
        assert wrapper.wrote
        assert local.what == []
        wrapper.commit()
        assert local.what == ["mark", "finish"]
        assert not wrapper.wrote
        CachedTag.objects.create(user_id=ONE, name="b")
        wrapper.rollback()
        assert local.what == ["mark", "finish"]
        assert not wrapper.wrote
        CachedTag.objects.create(user_id=ONE, name="c")
        if wrapper.vendor == "postgresql":  # Django's backend refuses it in a transaction.
            wrapper.commit()
    finally:
        wrapper.set_autocommit(True)  # commits
    assert local.what == ["mark", "finish"] * 2
    assert committed(ONE) == 2
    assert guard_of(local, ONE).open == ()


def test_closing_inside_a_transaction(local: Recorded) -> None:
    wrapper: Any = connections[SHARD[ONE]]
    with transaction.atomic(using=SHARD[ONE]):
        CachedTag.objects.create(user_id=ONE, name="a")
        wrapper.close()
    assert local.what == []
    CachedTag.objects.create(user_id=ONE, name="b")
    assert local.what == ["mark", "finish"]
    assert committed(ONE) == 1


def test_wrote(local: Recorded) -> None:
    wrapper: Any = connections[SHARD[ONE]]
    CachedTag.objects.create(user_id=ONE, name="a")
    assert not wrapper.wrote
    with transaction.atomic(using="photos"):
        assert CachedTag.objects.uncached().filter(user_id=ONE).count() == 1
        assert not wrapper.wrote
        CachedTag.objects.filter(user_id=ONE).update(uses=2)
        assert wrapper.wrote
    assert not wrapper.wrote


def test_flush(local: Recorded) -> None:
    CachedCountry.objects.create(name="A")
    found = local.guard(scope(CachedCountry))
    assert found is not None
    wrapper = connections["default"]
    tables = [CachedCountry._meta.db_table]
    with wrapper.constraint_checks_disabled():
        from django.core.management.color import no_style

        # PostgreSQL empties tables that refer to these only together with them.
        flush = wrapper.ops.sql_flush(no_style(), tables, allow_cascade=True)
        wrapper.ops.execute_sql_flush(flush)
    after = local.guard(scope(CachedCountry))
    assert after is not None
    assert after.open == ()
    assert after.generation != found.generation


def test_guards_stay_short(recorded: Recorded) -> None:
    for number in range(60):
        CachedCountry.objects.create(name=str(number))
    found = recorded.guard(scope(CachedCountry))
    assert found is not None
    assert found.size < 4096
    assert found.open == ()


class Clock:
    """The monotonic clock of writers, which a test can advance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = 0.0
        real = time.monotonic

        class Shifted:
            time = staticmethod(time.time)
            monotonic = staticmethod(lambda: real() + self.ahead)

        monkeypatch.setattr(markers, "time", Shifted)

    def pass_by(self, seconds: float) -> None:
        self.ahead += seconds


def start_of_commit(
    monkeypatch: pytest.MonkeyPatch, wrapper: Any, do: Callable[[], object]
) -> None:
    around_commit(monkeypatch, wrapper, do, lambda: None)


def end_of_commit(monkeypatch: pytest.MonkeyPatch, wrapper: Any, do: Callable[[], object]) -> None:
    around_commit(monkeypatch, wrapper, lambda: None, do)


def around_commit(
    monkeypatch: pytest.MonkeyPatch,
    wrapper: Any,
    before: Callable[[], object],
    after: Callable[[], object],
) -> None:
    """Run functions around the database's own COMMIT."""
    conclude = wrapper._commit_writes

    def commit_writes(commit: Callable[[], object]) -> None:
        def run() -> None:
            before()
            commit()
            after()

        conclude(run)

    monkeypatch.setattr(wrapper, "_commit_writes", commit_writes)
