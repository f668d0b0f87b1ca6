"""The interleavings in which weaker protocols serve what a commit has replaced.

Each scenario is played with the protocol as it is, on every kind of store, and once more
with the guard measure that it is about taken away: then something stale must be read, or
the scenario would prove nothing.
"""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.conf import settings
from django.db import DatabaseError, connections, transaction
from django.test import override_settings

from sharded_orm import runtime
from sharded_orm.cache import guards
from sharded_orm.cache.keys import CachedType
from sharded_orm.cache.stores.base import ServerDown
from sharded_orm.exceptions import CacheUnavailable
from sharded_orm.models.cached import cached_model
from sharded_orm.models.cached.write_observer import transaction_markers
from tests.cached.models import CachedAlbum, CachedPhoto
from tests.integration.cache.faults import ablations, failpoints
from tests.integration.cache.interleaving import (
    USER,
    Stage,
    Stale,
    all_titles,
    count,
    move,
    rename,
    title,
    titles,
)

SHARD = 3
ALIAS = f"photos_{SHARD:05d}"
ALBUM, OTHER, THIRD = 10, 20, 30

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(
        databases=["default", "directory", "tickets_1", "tickets_2", "photos"], transaction=True
    ),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]


STORES = ["local", "memcached", "redis", "separate", "aliases"]


@pytest.fixture(params=STORES)
def stores(request: pytest.FixtureRequest) -> Iterator[None]:
    """Cache servers; separate ones for objects and lists, and one under two aliases, too."""
    own: dict[str, Any] = {}
    if request.param == "local":
        backend = "django.core.cache.backends.locmem.LocMemCache"
        own["local"] = {"BACKEND": backend, "LOCATION": uuid.uuid4().hex}
    if request.param == "aliases":
        entry = request.getfixturevalue("memcached").django()
        # Named twice: not the same servers as those of the other alias, but for each place it is.
        own["another"] = {**entry, "LOCATION": [entry["LOCATION"]] * 2}
    if request.param in ("memcached", "separate", "aliases"):
        own["memcached"] = request.getfixturevalue("memcached").django()
    if request.param in ("redis", "separate"):
        own["redis"] = request.getfixturevalue("redis_server").django()
    first, *others = own
    config = {**settings.SHARDED_ORM["CACHE"], "OBJECTS": first, "LISTS": [first, *others][-1]}
    config["TIMEOUT"] = 1.0  # Two processors are shared by all tests.
    with override_settings(
        CACHES={**settings.CACHES, **own},
        SHARDED_ORM={**settings.SHARDED_ORM, "CACHE": config},
    ):
        yield


@pytest.fixture
def stage(stores: None, transactional_db: None) -> Stage:
    store = runtime.strategy("photos").store  # type: ignore[attr-defined]
    store.place("photos", {str(USER): SHARD})
    CachedAlbum.objects.bulk_create(CachedAlbum(pk=pk, user_id=USER) for pk in (ALBUM, OTHER))
    return Stage(ALIAS)


# The scenarios. What a measure prevents shows as Stale.


def late_fill(stage: Stage) -> None:
    """A reader stores what it has read before the commit, after the objects were deleted."""
    pk = stage.photo("old")
    stage.settle()
    reader, filling = stage.begin(lambda: title(pk), ("before", "fill"))
    filling.wait()
    rename(pk)
    filling.release()
    assert reader.join() == "old"
    stage.reads(lambda: title(pk), "new")
    stage.reads_again(lambda: title(pk), "new")


def late_fill_of_a_list(stage: Stage) -> None:
    """The same of a list and its objects."""
    pk = stage.photo("old")
    stage.warm(all_titles)
    stage.delete_object(pk)
    reader, filling = stage.begin(all_titles, ("before", "fill"))
    filling.wait()
    rename(pk)
    filling.release()
    assert reader.join() == ["old"]
    stage.reads(all_titles, ["new"])
    stage.reads(lambda: title(pk), "new")
    stage.reads_again(all_titles, ["new"])


def late_fill_with_the_lease_of_another(stage: Stage) -> None:
    """While the late one waits, another reader leases the same object."""
    pk = stage.photo("old")
    stage.settle()
    first, first_fills = stage.begin(lambda: title(pk), ("before", "fill"))
    first_fills.wait()
    rename(pk)
    second, second_fills = stage.begin(lambda: title(pk), ("before", "fill"))
    second_fills.wait()
    first_fills.release()
    assert first.join() == "old"
    stage.reads(lambda: title(pk), "new")
    second_fills.release()
    assert second.join() == "new"
    stage.reads_again(lambda: title(pk), "new")


def killed_before_closing(stage: Stage) -> None:
    """A writer is killed after COMMIT, before it has deleted anything."""
    pk = stage.photo("old")
    stage.warm(lambda: title(pk), all_titles, lambda: count(None))
    stage.killed(lambda: rename(pk), die=("before", "finish"))
    stage.reads(lambda: title(pk), "new")
    stage.reads(all_titles, ["new"])
    stage.reads_again(lambda: title(pk), "new")
    stage.reads_again(all_titles, ["new"])
    assert not stage.open_markers()


def killed_and_repaired_by_a_list(stage: Stage) -> None:
    """The first to repair asks for a count, perhaps under another alias of the same server."""
    pk = stage.photo("old")
    stage.warm(lambda: title(pk), lambda: count(ALBUM))
    stage.killed(lambda: rename(pk), die=("before", "finish"))
    stage.clock.advance(20)
    stage.reads(lambda: count(ALBUM), 0)
    stage.reads(all_titles, ["new"])
    stage.reads(lambda: title(pk), "new")
    stage.reads_again(lambda: title(pk), "new")


def killed_before_commit(stage: Stage) -> None:
    """A writer is killed when it has marked, and its transaction never happens."""
    pk = stage.photo("old")
    stage.warm(lambda: title(pk), all_titles)
    stage.killed(lambda: rename(pk), die=("after", "announce"))
    stage.reads(lambda: title(pk), "old")
    stage.reads_again(lambda: title(pk), "old")
    stage.reads_again(all_titles, ["old"])
    assert not stage.open_markers()


def evicted_between_mark_and_commit(stage: Stage) -> None:
    """… with two readers, and the writer is killed: nobody knows of the write any more."""
    pk = stage.photo("old")
    stage.warm(lambda: title(pk), all_titles)
    writer = stage.begin_process(
        lambda: rename(pk), stop=("after", "announce"), die=("before", "finish")
    )
    writer.wait()
    stage.evict()
    for read, expected in ((lambda: title(pk), "old"), (all_titles, ["old"])):
        first, _ = stage.begin(read)[0], None
        assert first.join() == expected
        assert stage.begin(read)[0].join() == expected
    writer.release()
    writer.join()
    stage.reads(lambda: title(pk), "new")
    stage.reads(all_titles, ["new"])
    stage.reads_again(lambda: title(pk), "new")
    stage.reads_again(all_titles, ["new"])


def evicted_after_a_kill(stage: Stage) -> None:
    """The marker of a killed writer is evicted: the guard that is made anew is another one."""
    pk = stage.photo("old")
    stage.warm(lambda: title(pk), all_titles)
    stage.killed(lambda: rename(pk), die=("before", "finish"))
    stage.evict()
    stage.reads(lambda: title(pk), "new")
    stage.settle()
    stage.reads(lambda: title(pk), "new")
    stage.reads(all_titles, ["new"])
    stage.reads_again(all_titles, ["new"])


def two_writers_at_once(stage: Stage) -> None:
    """One closes its marker while the other is between COMMIT and closing."""
    one, other = stage.photo("one"), stage.photo("other")
    stage.warm(lambda: title(one), lambda: title(other), all_titles)
    slow, marked, committed = stage.begin(
        lambda: rename(one, "ONE"), ("after", "announce"), ("before", "finish")
    )
    marked.wait()
    if connections[ALIAS].vendor == "sqlite":
        # One writer at a time: the fast one is a transaction that changed nothing after all.
        with transaction.atomic(using=ALIAS):
            transaction_markers(connections[ALIAS]).touch(stage.scope(), [str(other)])  # type: ignore[union-attr]
        expected = "other"
    else:
        rename(other, "OTHER")
        expected = "OTHER"
    marked.release()
    committed.wait()
    stage.reads(lambda: title(one), "ONE")
    stage.reads(lambda: title(other), expected)
    stage.reads(all_titles, ["ONE", expected])
    committed.release()
    slow.join()
    stage.reads_again(all_titles, ["ONE", expected])
    assert not stage.open_markers()


def a_guard_is_never_what_it_was(stage: Stage) -> None:
    """A list that was stored before a write is not found after it."""
    stage.photo("one")
    stage.warm(all_titles)
    stage.photo("other")
    stage.reads(all_titles, ["one", "other"])
    stage.reads_again(all_titles, ["one", "other"])


def moves_between_isolate_keys(stage: Stage) -> None:
    """A row leaves the list of one album for that of another; the writer is slow."""
    pk = stage.photo("photo", ALBUM)
    stage.warm(lambda: titles(ALBUM), lambda: titles(OTHER), lambda: count(ALBUM))
    stage.warm(lambda: count(OTHER), lambda: titles(THIRD))
    writer, marked, committed = stage.begin(
        lambda: move(pk, OTHER), ("after", "announce"), ("before", "finish")
    )
    marked.wait()
    stage.reads(lambda: titles(ALBUM), ["photo"])
    stage.reads(lambda: titles(OTHER), [])
    stage.reads(lambda: count(OTHER), 0)
    # Nothing of this concerns a third album.
    assert stage.asked(lambda: titles(THIRD)) == ([], False)
    marked.release()
    committed.wait()
    stage.reads(lambda: titles(ALBUM), [])
    stage.reads(lambda: titles(OTHER), ["photo"])
    stage.reads(lambda: count(ALBUM), 0)
    stage.reads(lambda: count(OTHER), 1)
    committed.release()
    writer.join()
    for read, expected in (
        (lambda: titles(ALBUM), []), (lambda: titles(OTHER), ["photo"]),
        (lambda: count(ALBUM), 0), (lambda: count(OTHER), 1),
    ):  # fmt: skip
        stage.reads_again(read, expected)


def moves_and_is_killed(stage: Stage) -> None:
    """The same, and the writer never closes."""
    pk = stage.photo("photo", ALBUM)
    stage.warm(lambda: titles(ALBUM), lambda: titles(OTHER))
    writer = stage.begin_process(
        lambda: move(pk, OTHER), stop=("after", "announce"), die=("before", "finish")
    )
    writer.wait()
    stage.reads(lambda: titles(ALBUM), ["photo"])
    stage.reads(lambda: titles(OTHER), [])
    writer.release()
    writer.join()
    stage.reads(lambda: titles(ALBUM), [])
    stage.reads(lambda: titles(OTHER), ["photo"])
    stage.reads_again(lambda: titles(ALBUM), [])
    stage.reads_again(lambda: titles(OTHER), ["photo"])
    assert not stage.open_markers(ALBUM, OTHER)


def unlisted_rows_and_a_kill(stage: Stage) -> None:
    """More rows than a marker lists; the writer is killed, and a reader repairs."""
    pk, *_ = stage.photos(guards.MAX_LISTED + 1)
    stage.warm(lambda: title(pk))
    stage.killed(
        lambda: CachedPhoto.objects.filter(user_id=USER).update(title="new"),
        die=("before", "finish"),
    )
    stage.reads(lambda: title(pk), "new")
    stage.reads_again(lambda: title(pk), "new")


def stopped_for_long_after_marking(stage: Stage) -> None:
    """A writer stands still for a minute; it marks again before it commits."""
    pk = stage.photo("old")
    stage.warm(lambda: title(pk), all_titles)
    writer, marked, committed = stage.begin(
        lambda: rename(pk), ("after", "mark"), ("before", "finish")
    )
    marked.wait()
    stage.clock.advance(60)
    for _ in range(3):
        stage.reads(lambda: title(pk), "old")
        stage.reads(all_titles, ["old"])
        stage.clock.advance(20)
    marked.release()
    committed.wait()
    stage.reads(lambda: title(pk), "new")
    stage.reads(all_titles, ["new"])
    committed.release()
    writer.join()
    assert not stage.open_markers()
    stage.reads_again(lambda: title(pk), "new")
    stage.reads_again(all_titles, ["new"])


def stopped_for_long_before_commit(stage: Stage) -> None:
    """Only the database knows that the writer lives: a COMMIT may be under way for long."""
    pk = stage.photo("old")
    stage.warm(lambda: title(pk), all_titles)
    writer, announced, committed = stage.begin(
        lambda: rename(pk), ("after", "announce"), ("before", "finish")
    )
    announced.wait()
    stage.clock.advance(60)
    for _ in range(3):
        stage.reads(lambda: title(pk), "old")
        stage.reads(all_titles, ["old"])
        stage.clock.advance(20)
    announced.release()
    committed.wait()
    stage.reads(lambda: title(pk), "new")
    stage.reads(all_titles, ["new"])
    committed.release()
    writer.join()
    stage.reads_again(lambda: title(pk), "new")


def list_and_objects_of_one_state(stage: Stage) -> None:
    """Between the list and its objects, a row leaves the list and is cached as it is now."""
    pk = stage.photo("here", ALBUM)
    stage.warm(lambda: titles(ALBUM), lambda: title(pk))
    stage.forget_lists()
    # Guards first, then the list, then the objects.
    reader, first, second = stage.begin(lambda: titles(ALBUM), ("after", "read"), ("after", "read"))
    first.wait()
    first.release()
    second.wait()
    CachedPhoto.objects.filter(user_id=USER, photo_id=pk).update(album_id=OTHER, title="there")
    stage.reads_again(lambda: title(pk), "there")
    second.release()
    if (found := reader.join()) not in (["here"], []):
        raise Stale(f"{found!r} never was")
    stage.reads(lambda: titles(ALBUM), [])


def two_versions_of_the_code(stage: Stage) -> None:
    """In a deploy, processes of the old and of the new model write the same row."""
    pk = stage.photo("v0")

    def one() -> str:
        return title(pk)

    stage.warm(one, all_titles)

    def newer() -> None:
        process = stage.process
        assert process is not None
        be_another_version()
        stage.reads_again(one, "v0")
        stage.reads_again(all_titles, ["v0"])
        process.stop()
        stage.reads(one, "v1")
        stage.reads(all_titles, ["v1"])
        stage.warm(one, all_titles)
        rename(pk, "v2")
        process.stop()
        stage.at("before", "finish", process.die)
        rename(pk, "v3")

    process = stage.begin_process(newer)
    process.wait()
    stage.reads(one, "v0")
    rename(pk, "v1")
    stage.reads(one, "v1")
    stage.warm(one, all_titles)
    process.release()
    process.wait()
    stage.reads(one, "v2")
    stage.reads(all_titles, ["v2"])
    stage.warm(one, all_titles)
    process.release()
    process.join()
    stage.reads(one, "v3")
    stage.reads(all_titles, ["v3"])
    stage.reads_again(one, "v3")
    stage.reads_again(all_titles, ["v3"])


def be_another_version() -> None:
    """From now on, this process has another model of the same name."""
    fingerprint = cached_model.fingerprint
    cached_model.fingerprint = lambda model: fingerprint(model)[::-1]
    cached_model.forget()


# Ablations of our own.


def one_look() -> None:
    """An actor believes what it has first seen of a guard."""
    seen = threading.local()

    def read(method: Any, server: Any, names: Any, objects: Any = (), again: Any = ()) -> Any:
        values, found, last = method(server, names, objects, again)
        if threading.current_thread() is threading.main_thread():
            return values, found, last
        known = vars(seen).setdefault(server.name, {})
        for name, value in zip(names, values, strict=True):
            known.setdefault(name, value)
        return [known[name] for name in names], found, [known.get(name) for name in again]

    for cls in failpoints.servers():
        if failpoints.implements(cls, "read"):
            failpoints.wrap(cls, "read", read)


def names_of_versions() -> None:
    """The fingerprint is a part of all names."""
    made = CachedType.__post_init__

    def post_init(type: CachedType) -> None:
        made(type)
        object.__setattr__(type, "name", f"{type.name}.{type.fingerprint}")

    CachedType.__post_init__ = post_init  # type: ignore[method-assign]  # in a process of its own
    cached_model.forget()


OWN_ABLATIONS = {made.__name__: made for made in (one_look, names_of_versions)}

#: With what taken away (above, or in tests.integration.cache.faults.ablations) it goes wrong.
SCENARIOS: dict[Callable[[Stage], None], list[str]] = {
    late_fill: ["no_lease"],
    late_fill_of_a_list: ["no_lease"],
    late_fill_with_the_lease_of_another: ["no_lease"],
    killed_before_closing: ["no_markers", "heedless", "bump_after_commit"],
    killed_and_repaired_by_a_list: ["no_markers", "heedless"],
    killed_before_commit: [],
    evicted_between_mark_and_commit: ["no_quarantine"],
    evicted_after_a_kill: ["same_generation"],
    two_writers_at_once: ["one_slot"],
    a_guard_is_never_what_it_was: ["no_salt"],
    moves_between_isolate_keys: ["no_markers", "heedless"],
    moves_and_is_killed: ["no_markers", "heedless"],
    unlisted_rows_and_a_kill: ["no_markers", "heedless"],
    stopped_for_long_after_marking: [],
    stopped_for_long_before_commit: ["repair_without_asking"],
    list_and_objects_of_one_state: ["one_look"],
    two_versions_of_the_code: ["names_of_versions"],
}


FORKING = {
    killed_before_closing,
    killed_and_repaired_by_a_list,
    killed_before_commit,
    evicted_between_mark_and_commit,
    evicted_after_a_kill,
    moves_and_is_killed,
    unlisted_rows_and_a_kill,
    two_versions_of_the_code,
}


def _cases(*, with_ablations: bool) -> list[Any]:
    cases = []
    for scenario, those in SCENARIOS.items():
        # SQLite has no sessions to ask for.
        marks = [pytest.mark.mysql_settings] * (scenario is stopped_for_long_before_commit)
        for store in STORES:
            if store == "local" and scenario in FORKING:
                continue  # Each process has a memory of its own.
            name = f"{store}-{scenario.__name__}"
            if not with_ablations:
                cases.append(pytest.param(store, scenario, marks=marks, id=name))
                continue
            for one in those:
                cases.append(pytest.param(store, scenario, one, marks=marks, id=f"{name}-{one}"))
    return cases


@pytest.mark.parametrize(("stores", "scenario"), _cases(with_ablations=False), indirect=["stores"])
def test_nothing_stale_is_read(
    scenario: Callable[[Stage], None], stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.install(monkeypatch)
    scenario(stage)


@pytest.mark.parametrize(
    ("stores", "scenario", "ablation"), _cases(with_ablations=True), indirect=["stores"]
)
def test_each_measure_is_needed(
    scenario: Callable[[Stage], None], ablation: str, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, as an ablation replaces parts of the library."""
    connections.close_all()
    pid = os.fork()
    if pid == 0:
        status = 3
        try:
            if ablation in OWN_ABLATIONS:
                OWN_ABLATIONS[ablation]()
            else:
                ablations.apply(ablation)
            stage.install(monkeypatch)
            scenario(stage)
            status = 2
        except Stale:
            status = 0
        except BaseException:  # whatever it is, the parent tells that it failed
            traceback.print_exc()
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status != 2, "nothing stale was read: the scenario is blind"
    assert status == 0


# What transactions leave behind.


@pytest.fixture
def ready(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Stage:
    stage.install(monkeypatch)
    return stage


def test_a_rollback_marks_nothing(ready: Stage) -> None:
    pk = ready.photo("old")
    ready.warm(lambda: title(pk), all_titles)
    ready.calls.clear()
    with contextlib.suppress(ZeroDivisionError), transaction.atomic(using=ALIAS):
        rename(pk)
        raise ZeroDivisionError
    assert "mark" not in ready.calls
    assert ready.asked(lambda: title(pk)) == ("old", False)
    assert ready.asked(all_titles) == (["old"], False)


def test_a_rolled_back_savepoint_leaves_nothing_marked(ready: Stage) -> None:
    pk, other = ready.photo("old"), ready.photo("other")
    ready.warm(lambda: title(pk), lambda: title(other))
    with transaction.atomic(using=ALIAS):
        rename(other, "OTHER")
        with contextlib.suppress(ZeroDivisionError), transaction.atomic(using=ALIAS):
            rename(pk)
            raise ZeroDivisionError
    assert not ready.open_markers()
    ready.reads_again(lambda: title(pk), "old")
    ready.reads_again(lambda: title(other), "OTHER")


def _down(call: Any, *args: Any) -> Any:
    raise ServerDown("test")


def _unheard(call: Any, *args: Any) -> Any:
    call(*args)
    raise ServerDown("test")


@pytest.mark.parametrize("failure", [_down, _unheard])
def test_what_cannot_be_marked_is_rolled_back(ready: Stage, failure: Callable[..., Any]) -> None:
    pk = ready.photo("old")
    ready.warm(lambda: title(pk), all_titles)
    with ready.instead("mark", failure), pytest.raises(CacheUnavailable):
        rename(pk)
    ready.reads(lambda: title(pk), "old")
    ready.reads_again(lambda: title(pk), "old")
    assert not ready.open_markers()
    rename(pk)
    ready.reads(lambda: title(pk), "new")
    ready.reads_again(all_titles, ["new"])


def test_a_mark_that_lands_after_its_closing(ready: Stage) -> None:
    pk = ready.photo("old")
    ready.warm(lambda: title(pk), all_titles)
    under_way: list[Callable[[], Any]] = []

    def late(call: Any, *args: Any) -> Any:
        under_way.append(lambda: call(*args))
        raise ServerDown("test")

    with ready.instead("mark", late), pytest.raises(CacheUnavailable):
        rename(pk)
    ready.reads(lambda: title(pk), "old")
    for land in under_way:
        land()
    assert not ready.open_markers()
    ready.reads_again(lambda: title(pk), "old")
    rename(pk)
    ready.reads(lambda: title(pk), "new")


@pytest.mark.parametrize("failure", [_down, _unheard])
def test_a_closing_that_fails_is_made_up_for(ready: Stage, failure: Callable[..., Any]) -> None:
    pk = ready.photo("old")
    ready.warm(lambda: title(pk), all_titles)
    with ready.instead("finish", failure):
        rename(pk)
        ready.reads(lambda: title(pk), "new")
        ready.reads(all_titles, ["new"])
    ready.reads(lambda: title(pk), "new")
    ready.reads_again(lambda: title(pk), "new")
    ready.reads_again(all_titles, ["new"])
    assert not ready.open_markers()


def test_a_late_commit_marks_again(ready: Stage) -> None:
    pk = ready.photo("old")
    ready.warm(lambda: title(pk), all_titles)
    ready.lines.clear()
    delays = [3.0]

    def slow(call: Any, *args: Any) -> Any:
        result = call(*args)
        if delays:
            ready.clock.advance(delays.pop())
        return result

    with ready.instead("mark", slow):
        rename(pk)
    opened = {line[1:17] for line in ready.lines if line[:1] == b"+"}
    closed = {line[1:17] for line in ready.lines if line[:1] in b"-!"}
    assert len(opened) == 2
    assert closed == opened
    assert not ready.open_markers()
    ready.reads(lambda: title(pk), "new")
    ready.reads_again(all_titles, ["new"])


def test_a_late_commit_on_one_of_two_shards_marks_again(ready: Stage) -> None:
    """All shards are marked before the first one commits, and that takes long."""
    other_user = USER + 1
    store = runtime.strategy("photos").store  # type: ignore[attr-defined]
    store.place("photos", {str(other_user): SHARD + 1})
    pk = ready.photo("old")
    other: int = CachedPhoto.objects.create(user_id=other_user, title="old").pk
    ready.lines.clear()
    ready.calls.clear()
    delays = [3.0]

    def slow(call: Any, *args: Any) -> Any:
        if delays:
            ready.clock.advance(delays.pop())
        return call(*args)

    with ready.instead("finish", slow), transaction.atomic(using="photos"):
        rename(pk)
        CachedPhoto.objects.filter(user_id=other_user, photo_id=other).update(title="new")
    opened = [line[1:17] for line in ready.lines if line[:1] == b"+"]
    closed = [line[1:17] for line in ready.lines if line[:1] in b"-!"]
    assert ready.calls[:2] == ["mark", "mark"]
    assert len(set(opened)) == 3
    assert sorted(opened) == sorted(closed)
    ready.reads(lambda: title(pk), "new")


@pytest.mark.mysql_settings
def test_the_connection_is_lost_between_mark_and_commit(ready: Stage) -> None:
    pk = ready.photo("old")
    ready.warm(lambda: title(pk), all_titles)
    writer, marked = ready.begin(lambda: rename(pk), ("after", "mark"))
    marked.wait()
    (session,) = {marker.writer.connection for marker in ready.open_markers()}
    with connections[ALIAS].cursor() as cursor:
        cursor.execute(f"KILL {session}")
    marked.release()
    with pytest.raises(DatabaseError):
        writer.join()
    ready.reads(lambda: title(pk), "old")
    ready.reads_again(lambda: title(pk), "old")
    ready.reads_again(all_titles, ["old"])
    assert not ready.open_markers()
