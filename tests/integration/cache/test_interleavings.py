"""The interleavings in which weaker protocols serve rows from before a commit.

Each scenario runs with the protocol as it is, on every kind of store. It then runs without the
measure that it is about: then a stale answer must be read, or the scenario would prove nothing.
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
    InterleavingHarness,
    Stale,
    Writes,
    all_titles,
    count,
    learn_saves,
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
    """Cache servers; also separate ones for objects and lists, and one under two aliases."""
    own: dict[str, Any] = {}
    if request.param == "local":
        backend = "django.core.cache.backends.locmem.LocMemCache"
        own["local"] = {"BACKEND": backend, "LOCATION": uuid.uuid4().hex}
    if request.param == "aliases":
        entry = request.getfixturevalue("memcached").django()
        # The same server is named twice: these are not the servers of the other alias, but they
        # share their data.
        own["another"] = {**entry, "LOCATION": [entry["LOCATION"]] * 2}
    if request.param in ("memcached", "separate", "aliases"):
        own["memcached"] = request.getfixturevalue("memcached").django()
    if request.param in ("redis", "separate"):
        own["redis"] = request.getfixturevalue("redis_server").django()
    first, *others = own
    config = {**settings.SHARDED_ORM["CACHE"], "OBJECTS": first, "LISTS": [first, *others][-1]}
    config["TIMEOUT"] = 1.0  # two processors are shared by all tests
    with override_settings(
        CACHES={**settings.CACHES, **own},
        SHARDED_ORM={**settings.SHARDED_ORM, "CACHE": config},
    ):
        yield


@pytest.fixture
def harness(stores: None, transactional_db: None) -> InterleavingHarness:
    store = runtime.strategy("photos").store  # type: ignore[attr-defined]
    store.place("photos", {str(USER): SHARD})
    CachedAlbum.objects.bulk_create(CachedAlbum(pk=pk, user_id=USER) for pk in (ALBUM, OTHER))
    return InterleavingHarness(ALIAS)


# The scenarios. Without the measure, Stale is raised.


def late_fill(harness: InterleavingHarness) -> None:
    """A reader stores a row that it read before the commit, after the objects were deleted."""
    pk = harness.photo("old")
    harness.settle()
    reader, filling = harness.begin(lambda: title(pk), ("before", "fill"))
    filling.wait()
    rename(pk)
    filling.release()
    assert reader.join() == "old"
    harness.check(lambda: title(pk), "new")
    harness.check_cached_again(lambda: title(pk), "new")


def late_fill_of_a_list(harness: InterleavingHarness) -> None:
    """A reader stores a list and its objects late."""
    pk = harness.photo("old")
    harness.warm(all_titles)
    harness.delete_object(pk)
    reader, filling = harness.begin(all_titles, ("before", "fill"))
    filling.wait()
    rename(pk)
    filling.release()
    assert reader.join() == ["old"]
    harness.check(all_titles, ["new"])
    harness.check(lambda: title(pk), "new")
    harness.check_cached_again(all_titles, ["new"])


def late_fill_with_the_lease_of_another(harness: InterleavingHarness) -> None:
    """While the late reader waits, another reader leases the same object."""
    pk = harness.photo("old")
    harness.settle()
    first, first_fills = harness.begin(lambda: title(pk), ("before", "fill"))
    first_fills.wait()
    rename(pk)
    second, second_fills = harness.begin(lambda: title(pk), ("before", "fill"))
    second_fills.wait()
    first_fills.release()
    assert first.join() == "old"
    harness.check(lambda: title(pk), "new")
    second_fills.release()
    assert second.join() == "new"
    harness.check_cached_again(lambda: title(pk), "new")


def killed_before_closing(harness: InterleavingHarness) -> None:
    """A writer is killed after COMMIT, before it has deleted anything."""
    pk = harness.photo("old")
    harness.warm(lambda: title(pk), all_titles, lambda: count(None))
    harness.run_until_killed(lambda: rename(pk), die=("before", "finish"))
    harness.check(lambda: title(pk), "new")
    harness.check(all_titles, ["new"])
    harness.check_cached_again(lambda: title(pk), "new")
    harness.check_cached_again(all_titles, ["new"])
    assert not harness.open_markers()


def killed_and_repaired_by_a_list(harness: InterleavingHarness) -> None:
    """The first repairing reader asks for a count, perhaps under another alias of the server."""
    pk = harness.photo("old")
    harness.warm(lambda: title(pk), lambda: count(ALBUM))
    harness.run_until_killed(lambda: rename(pk), die=("before", "finish"))
    harness.clock.advance(20)
    harness.check(lambda: count(ALBUM), 0)
    harness.check(all_titles, ["new"])
    harness.check(lambda: title(pk), "new")
    harness.check_cached_again(lambda: title(pk), "new")


def killed_before_commit(harness: InterleavingHarness) -> None:
    """A writer is killed after it has marked, and its transaction never happens."""
    pk = harness.photo("old")
    harness.warm(lambda: title(pk), all_titles)
    harness.run_until_killed(lambda: rename(pk), die=("after", "announce"))
    harness.check(lambda: title(pk), "old")
    harness.check_cached_again(lambda: title(pk), "old")
    harness.check_cached_again(all_titles, ["old"])
    assert not harness.open_markers()


def evicted_between_mark_and_commit(harness: InterleavingHarness) -> None:
    """Two readers read in between, and the writer is killed: nobody knows of the write any more."""
    pk = harness.photo("old")
    harness.warm(lambda: title(pk), all_titles)
    writer = harness.begin_process(
        lambda: rename(pk), stop=("after", "announce"), die=("before", "finish")
    )
    writer.wait()
    harness.evict()
    for read, expected in ((lambda: title(pk), "old"), (all_titles, ["old"])):
        first, _ = harness.begin(read)[0], None
        assert first.join() == expected
        assert harness.begin(read)[0].join() == expected
    writer.release()
    writer.join()
    harness.check(lambda: title(pk), "new")
    harness.check(all_titles, ["new"])
    harness.check_cached_again(lambda: title(pk), "new")
    harness.check_cached_again(all_titles, ["new"])


def evicted_after_a_kill(harness: InterleavingHarness) -> None:
    """The marker of a killed writer is evicted: the new guard has another generation."""
    pk = harness.photo("old")
    harness.warm(lambda: title(pk), all_titles)
    harness.run_until_killed(lambda: rename(pk), die=("before", "finish"))
    harness.evict()
    harness.check(lambda: title(pk), "new")
    harness.settle()
    harness.check(lambda: title(pk), "new")
    harness.check(all_titles, ["new"])
    harness.check_cached_again(all_titles, ["new"])


def two_writers_at_once(harness: InterleavingHarness) -> None:
    """One writer closes its marker while the other is between COMMIT and closing."""
    one, other = harness.photo("one"), harness.photo("other")
    harness.warm(lambda: title(one), lambda: title(other), all_titles)
    slow, marked, committed = harness.begin(
        lambda: rename(one, "ONE"), ("after", "announce"), ("before", "finish")
    )
    marked.wait()
    if connections[ALIAS].vendor == "sqlite":
        # One writer at a time: the fast one is a transaction that changes nothing in the end.
        with transaction.atomic(using=ALIAS):
            transaction_markers(connections[ALIAS]).touch(harness.scope(), [str(other)])  # type: ignore[union-attr]
        expected = "other"
    else:
        rename(other, "OTHER")
        expected = "OTHER"
    marked.release()
    committed.wait()
    harness.check(lambda: title(one), "ONE")
    harness.check(lambda: title(other), expected)
    harness.check(all_titles, ["ONE", expected])
    committed.release()
    slow.join()
    harness.check_cached_again(all_titles, ["ONE", expected])
    assert not harness.open_markers()


def a_guard_is_never_what_it_was(harness: InterleavingHarness) -> None:
    """A list that was stored before a write is not found after it."""
    harness.photo("one")
    harness.warm(all_titles)
    harness.photo("other")
    harness.check(all_titles, ["one", "other"])
    harness.check_cached_again(all_titles, ["one", "other"])


def moves_between_isolate_keys(harness: InterleavingHarness) -> None:
    """A row leaves the list of one album for the list of another; the writer is slow."""
    pk = harness.photo("photo", ALBUM)
    harness.warm(lambda: titles(ALBUM), lambda: titles(OTHER), lambda: count(ALBUM))
    harness.warm(lambda: count(OTHER), lambda: titles(THIRD))
    writer, marked, committed = harness.begin(
        lambda: move(pk, OTHER), ("after", "announce"), ("before", "finish")
    )
    marked.wait()
    harness.check(lambda: titles(ALBUM), ["photo"])
    harness.check(lambda: titles(OTHER), [])
    harness.check(lambda: count(OTHER), 0)
    # The third album is not affected.
    assert harness.observe(lambda: titles(THIRD)) == ([], False)
    marked.release()
    committed.wait()
    harness.check(lambda: titles(ALBUM), [])
    harness.check(lambda: titles(OTHER), ["photo"])
    harness.check(lambda: count(ALBUM), 0)
    harness.check(lambda: count(OTHER), 1)
    committed.release()
    writer.join()
    for read, expected in (
        (lambda: titles(ALBUM), []), (lambda: titles(OTHER), ["photo"]),
        (lambda: count(ALBUM), 0), (lambda: count(OTHER), 1),
    ):  # fmt: skip
        harness.check_cached_again(read, expected)


def moves_and_is_killed(harness: InterleavingHarness) -> None:
    """A row leaves one album for another, and the writer never closes its markers."""
    pk = harness.photo("photo", ALBUM)
    harness.warm(lambda: titles(ALBUM), lambda: titles(OTHER))
    writer = harness.begin_process(
        lambda: move(pk, OTHER), stop=("after", "announce"), die=("before", "finish")
    )
    writer.wait()
    harness.check(lambda: titles(ALBUM), ["photo"])
    harness.check(lambda: titles(OTHER), [])
    writer.release()
    writer.join()
    harness.check(lambda: titles(ALBUM), [])
    harness.check(lambda: titles(OTHER), ["photo"])
    harness.check_cached_again(lambda: titles(ALBUM), [])
    harness.check_cached_again(lambda: titles(OTHER), ["photo"])
    assert not harness.open_markers(ALBUM, OTHER)


def unlisted_rows_and_a_kill(harness: InterleavingHarness) -> None:
    """More rows than a marker lists; the writer is killed, and a reader repairs."""
    pk, *_ = harness.photos(guards.MAX_LISTED + 1)
    harness.warm(lambda: title(pk))
    harness.run_until_killed(
        lambda: CachedPhoto.objects.filter(user_id=USER).update(title="new"),
        die=("before", "finish"),
    )
    harness.check(lambda: title(pk), "new")
    harness.check_cached_again(lambda: title(pk), "new")


def stopped_for_long_after_marking(harness: InterleavingHarness) -> None:
    """A writer is stopped for a minute; it marks again before it commits."""
    pk = harness.photo("old")
    harness.warm(lambda: title(pk), all_titles)
    writer, marked, committed = harness.begin(
        lambda: rename(pk), ("after", "mark"), ("before", "finish")
    )
    marked.wait()
    harness.clock.advance(60)
    for _ in range(3):
        harness.check(lambda: title(pk), "old")
        harness.check(all_titles, ["old"])
        harness.clock.advance(20)
    marked.release()
    committed.wait()
    harness.check(lambda: title(pk), "new")
    harness.check(all_titles, ["new"])
    committed.release()
    writer.join()
    assert not harness.open_markers()
    harness.check_cached_again(lambda: title(pk), "new")
    harness.check_cached_again(all_titles, ["new"])


def stopped_for_long_before_commit(harness: InterleavingHarness) -> None:
    """Only the database knows that the writer lives: a COMMIT may take long."""
    pk = harness.photo("old")
    harness.warm(lambda: title(pk), all_titles)
    writer, announced, committed = harness.begin(
        lambda: rename(pk), ("after", "announce"), ("before", "finish")
    )
    announced.wait()
    harness.clock.advance(60)
    for _ in range(3):
        harness.check(lambda: title(pk), "old")
        harness.check(all_titles, ["old"])
        harness.clock.advance(20)
    announced.release()
    committed.wait()
    harness.check(lambda: title(pk), "new")
    harness.check(all_titles, ["new"])
    committed.release()
    writer.join()
    harness.check_cached_again(lambda: title(pk), "new")


def list_and_objects_of_one_state(harness: InterleavingHarness) -> None:
    """Between the list and its objects, a row leaves the list and is cached in its new state."""
    pk = harness.photo("here", ALBUM)
    harness.warm(lambda: titles(ALBUM), lambda: title(pk))
    harness.forget_lists()
    # Guards first, then the list, then the objects.
    reader, first, second = harness.begin(
        lambda: titles(ALBUM), ("after", "read"), ("after", "read")
    )
    first.wait()
    first.release()
    second.wait()
    CachedPhoto.objects.filter(user_id=USER, photo_id=pk).update(album_id=OTHER, title="there")
    harness.check_cached_again(lambda: title(pk), "there")
    second.release()
    if (found := reader.join()) not in (["here"], []):
        raise Stale(f"{found!r} never was")
    harness.check(lambda: titles(ALBUM), [])


def rows_that_a_process_keeps(harness: InterleavingHarness) -> None:
    """A process that keeps the rows of lists reads only the guards, while rows are written."""
    pk = harness.photo("old", ALBUM)
    harness.warm(all_titles, lambda: titles(ALBUM))
    harness.check(all_titles, ["old"])
    harness.check(lambda: titles(ALBUM), ["old"])
    rename(pk)
    harness.check(all_titles, ["new"])
    harness.check(lambda: titles(ALBUM), ["new"])
    harness.warm(all_titles, lambda: titles(ALBUM))
    harness.check(all_titles, ["new"])
    harness.check(lambda: titles(ALBUM), ["new"])
    move(pk, OTHER)
    harness.check(all_titles, ["new"])
    harness.check(lambda: titles(ALBUM), [])


def two_versions_of_the_code(harness: InterleavingHarness) -> None:
    """During a deployment, processes of the old and of the new model write the same row."""
    pk = harness.photo("v0")

    def one() -> str:
        return title(pk)

    harness.warm(one, all_titles)

    def newer() -> None:
        process = harness.process
        assert process is not None
        be_another_version()
        harness.check_cached_again(one, "v0")
        harness.check_cached_again(all_titles, ["v0"])
        process.stop()
        harness.check(one, "v1")
        harness.check(all_titles, ["v1"])
        harness.warm(one, all_titles)
        rename(pk, "v2")
        process.stop()
        harness.at("before", "finish", process.die)
        rename(pk, "v3")

    process = harness.begin_process(newer)
    process.wait()
    harness.check(one, "v0")
    rename(pk, "v1")
    harness.check(one, "v1")
    harness.warm(one, all_titles)
    process.release()
    process.wait()
    harness.check(one, "v2")
    harness.check(all_titles, ["v2"])
    harness.warm(one, all_titles)
    process.release()
    process.join()
    harness.check(one, "v3")
    harness.check(all_titles, ["v3"])
    harness.check_cached_again(one, "v3")
    harness.check_cached_again(all_titles, ["v3"])


def be_another_version() -> None:
    """Give this process another model of the same name."""
    fingerprint = cached_model.fingerprint
    cached_model.fingerprint = lambda model: fingerprint(model)[::-1]
    cached_model.forget()


# Ablations for these scenarios only.


def one_look() -> None:
    """A reader keeps the first state that it has seen of a guard."""
    seen = threading.local()

    def read(method: Any, server: Any, names: Any, objects: Any = (), again: Any = ()) -> Any:
        values, found, last = method(server, names, objects, again)
        if threading.current_thread() is threading.main_thread():
            return values, found, last
        known = vars(seen).setdefault(server.name, {})
        for name, value in zip(names, values, strict=True):
            known.setdefault(name, value)
        return [known[name] for name in names], found, [known.get(name) for name in again]

    failpoints.without_read_again()
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

#: The ablations (above, or in tests.integration.cache.faults.ablations) with which each scenario
#: goes wrong.
SCENARIOS: dict[Callable[[InterleavingHarness], None], list[str]] = {
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
    rows_that_a_process_keeps: ["kept_for_ever"],
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


#: Here a save() closes its first marker before it writes: it goes on in a transaction, as the other
#: writes of these scenarios do.
IN_TRANSACTION = {moves_between_isolate_keys, moves_and_is_killed, stopped_for_long_after_marking}


def _cases(*, with_ablations: bool, by_save: bool = False) -> list[Any]:
    cases = []
    for scenario, those in SCENARIOS.items():
        if by_save and scenario in IN_TRANSACTION:
            continue
        # SQLite has no sessions to ask for.
        of_servers = [pytest.mark.mysql_settings] * (scenario is stopped_for_long_before_commit)
        for store in STORES:
            if store == "local" and scenario in FORKING:
                continue  # each process has a memory of its own
            name = f"{store}-{scenario.__name__}"
            # SQLite has all of them. What a server of the database adds are its sessions and snapshots, and
            # these are the same for each kind of store.
            is_elsewhere = scenario is not stopped_for_long_before_commit and store in (
                ("local", "aliases", "redis", "separate")
                if with_ablations
                else ("local", "aliases")
            )
            marks = [*of_servers, *[pytest.mark.long_on("mysql", "postgresql")] * is_elsewhere]
            if by_save:
                # SQLite sends each write in a transaction, and one kind of store shows the rest.
                is_routine = store == "memcached"
                marks = [
                    *of_servers,
                    pytest.mark.long_on("sqlite") if is_routine else pytest.mark.long,
                ]
            if not with_ablations:
                cases.append(pytest.param(store, scenario, marks=marks, id=name))
                continue
            for one in those:
                if one == "kept_for_ever" and store in ("separate", "aliases"):
                    continue  # rows are kept only if lists and objects are on one server
                cases.append(pytest.param(store, scenario, one, marks=marks, id=f"{name}-{one}"))
    return cases


@pytest.fixture
def saves(harness: InterleavingHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let writers use save(), which announces its write before the statement."""
    learn_saves()
    harness.evict()
    monkeypatch.setattr(Writes, "by_save", True)


@pytest.mark.parametrize(
    ("stores", "scenario"), _cases(with_ablations=False, by_save=True), indirect=["stores"]
)
def test_nothing_stale_is_read_after_save(
    scenario: Callable[[InterleavingHarness], None],
    harness: InterleavingHarness,
    saves: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness.install(monkeypatch)
    scenario(harness)


@pytest.mark.parametrize(("stores", "scenario"), _cases(with_ablations=False), indirect=["stores"])
def test_nothing_stale_is_read(
    scenario: Callable[[InterleavingHarness], None],
    harness: InterleavingHarness,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness.install(monkeypatch)
    scenario(harness)


@pytest.mark.parametrize(
    ("stores", "scenario", "ablation"), _cases(with_ablations=True), indirect=["stores"]
)
def test_each_measure_is_needed(
    scenario: Callable[[InterleavingHarness], None],
    ablation: str,
    harness: InterleavingHarness,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Runs in a process of its own, as an ablation replaces parts of the library."""
    _run_ablated(scenario, ablation, harness, monkeypatch)


@pytest.mark.parametrize(
    ("stores", "scenario", "ablation"),
    _cases(with_ablations=True, by_save=True),
    indirect=["stores"],
)
def test_each_measure_is_needed_by_save(
    scenario: Callable[[InterleavingHarness], None],
    ablation: str,
    harness: InterleavingHarness,
    saves: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _run_ablated(scenario, ablation, harness, monkeypatch)


def _run_ablated(
    scenario: Callable[[InterleavingHarness], None],
    ablation: str,
    harness: InterleavingHarness,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connections.close_all()
    pid = os.fork()
    if pid == 0:
        status = 3
        try:
            if ablation in OWN_ABLATIONS:
                OWN_ABLATIONS[ablation]()
            else:
                ablations.apply(ablation)
            harness.install(monkeypatch)
            scenario(harness)
            status = 2
        except Stale:
            status = 0
        except BaseException:  # the parent reports any failure
            traceback.print_exc()
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status != 2, "nothing stale was read: the scenario is blind"
    assert status == 0


# Markers and guards after a transaction.


@pytest.fixture
def ready(harness: InterleavingHarness, monkeypatch: pytest.MonkeyPatch) -> InterleavingHarness:
    harness.install(monkeypatch)
    return harness


def test_a_rollback_marks_nothing(ready: InterleavingHarness) -> None:
    pk = ready.photo("old")
    ready.warm(lambda: title(pk), all_titles)
    ready.calls.clear()
    with contextlib.suppress(ZeroDivisionError), transaction.atomic(using=ALIAS):
        rename(pk)
        raise ZeroDivisionError
    assert "mark" not in ready.calls
    assert ready.observe(lambda: title(pk)) == ("old", False)
    assert ready.observe(all_titles) == (["old"], False)


def test_a_rolled_back_savepoint_leaves_nothing_marked(ready: InterleavingHarness) -> None:
    pk, other = ready.photo("old"), ready.photo("other")
    ready.warm(lambda: title(pk), lambda: title(other))
    with transaction.atomic(using=ALIAS):
        rename(other, "OTHER")
        with contextlib.suppress(ZeroDivisionError), transaction.atomic(using=ALIAS):
            rename(pk)
            raise ZeroDivisionError
    assert not ready.open_markers()
    ready.check_cached_again(lambda: title(pk), "old")
    ready.check_cached_again(lambda: title(other), "OTHER")


def _down(call: Any, *args: Any) -> Any:
    raise ServerDown("test")


def _unheard(call: Any, *args: Any) -> Any:
    call(*args)
    raise ServerDown("test")


@pytest.mark.parametrize("failure", [_down, _unheard])
def test_what_cannot_be_marked_is_rolled_back(
    ready: InterleavingHarness, failure: Callable[..., Any]
) -> None:
    pk = ready.photo("old")
    ready.warm(lambda: title(pk), all_titles)
    with ready.instead("mark", failure), pytest.raises(CacheUnavailable):
        rename(pk)
    ready.check(lambda: title(pk), "old")
    ready.check_cached_again(lambda: title(pk), "old")
    assert not ready.open_markers()
    rename(pk)
    ready.check(lambda: title(pk), "new")
    ready.check_cached_again(all_titles, ["new"])


def test_a_mark_that_lands_after_its_closing(ready: InterleavingHarness) -> None:
    pk = ready.photo("old")
    ready.warm(lambda: title(pk), all_titles)
    under_way: list[Callable[[], Any]] = []

    def late(call: Any, *args: Any) -> Any:
        under_way.append(lambda: call(*args))
        raise ServerDown("test")

    with ready.instead("mark", late), pytest.raises(CacheUnavailable):
        rename(pk)
    ready.check(lambda: title(pk), "old")
    for land in under_way:
        land()
    assert not ready.open_markers()
    ready.check_cached_again(lambda: title(pk), "old")
    rename(pk)
    ready.check(lambda: title(pk), "new")


@pytest.mark.parametrize("failure", [_down, _unheard])
def test_a_closing_that_fails_is_made_up_for(
    ready: InterleavingHarness, failure: Callable[..., Any]
) -> None:
    pk = ready.photo("old")
    ready.warm(lambda: title(pk), all_titles)
    with ready.instead("finish", failure):
        rename(pk)
        ready.check(lambda: title(pk), "new")
        ready.check(all_titles, ["new"])
    ready.check(lambda: title(pk), "new")
    ready.check_cached_again(lambda: title(pk), "new")
    ready.check_cached_again(all_titles, ["new"])
    assert not ready.open_markers()


def test_a_late_commit_marks_again(ready: InterleavingHarness) -> None:
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
    ready.check(lambda: title(pk), "new")
    ready.check_cached_again(all_titles, ["new"])


def test_a_late_commit_on_one_of_two_shards_marks_again(ready: InterleavingHarness) -> None:
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
    ready.check(lambda: title(pk), "new")


@pytest.mark.mysql_settings
def test_the_connection_is_lost_between_mark_and_commit(ready: InterleavingHarness) -> None:
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
    ready.check(lambda: title(pk), "old")
    ready.check_cached_again(lambda: title(pk), "old")
    ready.check_cached_again(all_titles, ["old"])
    assert not ready.open_markers()
