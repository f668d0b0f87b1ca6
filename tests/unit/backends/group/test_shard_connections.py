"""Shard connections of a thread: bounded, closed and logged through their group."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from types import MethodType
from typing import Any

import pytest
from django.db import DatabaseError, close_old_connections, connections, reset_queries
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper
from django.db.transaction import atomic
from django.test.utils import CaptureQueriesContext
from django.utils.connection import ConnectionDoesNotExist

from sharded_orm.backends.group.cursor_methods import opens_as_django
from sharded_orm.backends.group.member import ShardConnectionMixin
from sharded_orm.backends.group.shard_connections import connection_of
from sharded_orm.backends.shard_database import ShardDatabaseMixin
from tests.transparent_methods import TransparentMethod

from .conftest import GROUP, Shards


@pytest.fixture
def limit(shards: Shards) -> int:
    shards.group.close()
    for wrapper in shards.group.shards:
        shards.group.shards.forget(wrapper)
    shards.group.shards.limit = 2
    return 2


def kept(shards: Shards) -> list[str]:
    return list(shards.group.shards.wrappers)


def use(shards: Shards, number: int) -> Any:
    with shards[number].cursor() as cursor:
        cursor.execute("SELECT 1")
    return shards[number]


def test_iteration_does_not_depend_on_the_shards_touched(shards: Shards) -> None:
    before = list(connections)
    for number in range(4):
        use(shards, number)
    assert list(connections) == before
    assert GROUP in before


def test_least_recently_used_wrapper_is_evicted(shards: Shards, limit: int) -> None:
    first = use(shards, 0)
    use(shards, 1)
    use(shards, 0)
    use(shards, 2)
    assert kept(shards) == [shards.alias(0), shards.alias(2)]
    assert shards[0] is first
    assert not hasattr(connections._connections, shards.alias(1))  # type: ignore[attr-defined]


def test_evicted_wrapper_is_freed(shards: Shards, limit: int) -> None:
    reference = weakref.ref(use(shards, 0))
    for number in (1, 2, 3):
        use(shards, number)
    gc.collect()
    assert reference() is None


def test_evicted_wrapper_that_is_held_goes_on_working(shards: Shards, limit: int) -> None:
    held = use(shards, 0)
    for number in (1, 2):
        use(shards, number)
    assert shards.alias(0) not in kept(shards)
    with held.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM thing")
        assert cursor.fetchone() == (0,)
    # It is the alias's connection again, so it takes part in transactions.
    assert shards[0] is held
    assert shards.alias(0) in kept(shards)
    with atomic(using=GROUP):
        shards.add(0, 1)
        assert shards.rows(0) == []


def test_replaced_wrapper_is_a_connection_of_its_own(shards: Shards, limit: int) -> None:
    held = use(shards, 0)
    for number in (1, 2):
        use(shards, number)
    assert use(shards, 0) is not held
    with held.cursor() as cursor:
        cursor.execute("SELECT 1")
    with pytest.raises(Exception, match="replaced"), atomic(using=GROUP), held.cursor() as cursor:
        cursor.execute("SELECT 1")
    held.close()


def test_wrappers_in_a_transaction_stay(shards: Shards, limit: int) -> None:
    with atomic(using=shards.alias(0)), atomic(using=GROUP):
        for number in range(4):
            shards.add(number, number)
        assert len(kept(shards)) == 4
    assert [shards.rows(number) for number in range(4)] == [[0], [1], [2], [3]]
    # There is no directory here. The errors of its look-ups refer to wrappers until they are collected.
    gc.collect()
    use(shards, 3)
    connections[shards.alias(5)].features  # noqa: B018  makes a wrapper
    assert len(kept(shards)) == limit


def test_wrappers_with_unread_rows_stay(shards: Shards, limit: int) -> None:
    shards.add(0, 1)
    shards.add(0, 2)
    cursor = shards[0].cursor()
    cursor.execute("SELECT value FROM thing ORDER BY value")
    assert cursor.fetchone() == (1,)
    for number in (1, 2, 3):
        use(shards, number)
    assert shards.alias(0) in kept(shards)
    assert cursor.fetchone() == (2,)
    cursor.close()
    del cursor
    for number in (1, 2, 3):
        use(shards, number)
    assert shards.alias(0) not in kept(shards)


def test_wrappers_somebody_watches_stay(shards: Shards, limit: int) -> None:
    with CaptureQueriesContext(shards[0]) as captured:
        use(shards, 0)
        for number in (1, 2, 3):
            use(shards, number)
        use(shards, 0)
    assert len(captured) == 2


def test_eviction_looks_at_a_few_only(shards: Shards, limit: int) -> None:
    """A transaction over many shards must not cost the square of their number."""
    looks = 0

    def look() -> bool:
        nonlocal looks
        looks += 1
        return False

    for number in range(16):
        shards[number].is_evictable = look
    assert looks <= 16 * 8
    assert len(kept(shards)) == 16


def test_closing_and_clearing_reach_the_shards(shards: Shards) -> None:
    shards.group.force_debug_cursor = True
    try:
        use(shards, 0)
        use(shards, 1)
    finally:
        shards.group.force_debug_cursor = False
    assert len(shards.group.queries_log) == 2
    assert len(shards[0].queries_log) == len(shards[1].queries_log) == 1
    reset_queries()
    assert not shards.group.queries_log
    assert not shards[0].queries_log
    connections.close_all()
    assert shards[0].connection is None
    assert shards[1].connection is None


def test_one_shards_log_does_not_hold_anothers(shards: Shards) -> None:
    with CaptureQueriesContext(shards[0]) as captured:
        use(shards, 0)
        use(shards, 1)
    assert [query["sql"] for query in captured] == ["SELECT 1"]


def test_execute_wrappers_of_the_group_apply_to_shards(shards: Shards) -> None:
    seen: list[str] = []

    def watch(name: str) -> Any:
        def wrapper(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
            seen.append(f"{name} {context['connection'].alias}")
            return execute(sql, params, many, context)

        return wrapper

    with shards.group.execute_wrapper(watch("group")):
        use(shards, 0)
        with shards[1].execute_wrapper(watch("own")):
            use(shards, 1)
    use(shards, 0)
    assert seen == ["group photos_00000", "group photos_00001", "own photos_00001"]


@pytest.mark.parametrize("name", ["execute", "_execute_with_wrappers", "_execute"])
@pytest.mark.parametrize("is_logged", [False, True])
def test_a_package_that_replaces_a_method_of_djangos_cursor_sees_each_statement(
    name: str, is_logged: bool, shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packages that trace statements do so."""
    original = getattr(CursorWrapper, name)
    seen: list[str] = []

    def traced(self: Any, sql: str, *args: Any, **kwargs: Any) -> Any:
        seen.append(f"{self.db.alias} {sql}")
        return original(self, sql, *args, **kwargs)

    use(shards, 0)
    shards[0].force_debug_cursor = is_logged
    with monkeypatch.context() as patched:
        patched.setattr(CursorWrapper, name, traced)
        use(shards, 0)
    use(shards, 0)
    assert seen == ["photos_00000 SELECT 1"]


def test_a_method_that_forbids_connections_forbids_statements(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: BaseDatabaseWrapper) -> None:
        raise AssertionError("no database here")

    def select() -> None:
        with connections[shards.alias(1)].cursor() as cursor:
            cursor.execute("SELECT 1")

    select()
    # pytest-django does so outside of tests that use a database.
    monkeypatch.setattr(BaseDatabaseWrapper, "ensure_connection", refuse)
    with pytest.raises(AssertionError, match="no database here"):
        select()


CURSOR_METHODS = [
    "_cursor",
    "_prepare_cursor",
    "close_if_health_check_failed",
    "ensure_connection",
    "validate_thread_sharing",
]


def observed(name: str, seen: list[str]) -> Any:
    """A method in place of Django's that calls it. It claims to be Django's."""
    original = getattr(BaseDatabaseWrapper, name)

    @wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(self.alias)
        return original(self, *args, **kwargs)

    return method


def observed_transparently(name: str, seen: list[str]) -> Any:
    return TransparentMethod(
        getattr(BaseDatabaseWrapper, name), lambda wrapper: seen.append(wrapper.alias)
    )


@pytest.mark.parametrize("observed", [observed, observed_transparently])
@pytest.mark.parametrize("name", CURSOR_METHODS)
def test_a_package_that_replaces_a_method_of_djangos_connections_sees_each_cursor(
    name: str, observed: Any, shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    use(shards, 0)
    use(shards, 0)
    with monkeypatch.context() as patched:
        patched.setattr(BaseDatabaseWrapper, name, observed(name, seen))
        for _ in range(2):
            del seen[:]
            use(shards, 0)
            assert shards.alias(0) in seen
    del seen[:]
    use(shards, 0)
    assert not seen


@pytest.mark.parametrize("name", CURSOR_METHODS)
def test_a_backend_that_overrides_a_method_of_connections_has_it_called(
    name: str, shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ENGINE of a project is a subclass of the package's."""
    use(shards, 0)
    seen: list[str] = []
    kind = type(shards[0])
    method = observed(name, seen)
    if name == "_cursor":
        # It is called by the package's.
        monkeypatch.setattr(ShardDatabaseMixin, name, method, raising=False)
    else:
        monkeypatch.setattr(shards[0], "__class__", type("Own", (kind,), {name: method}))
    for _ in range(2):
        del seen[:]
        use(shards, 0)
        assert shards.alias(0) in seen


@pytest.mark.parametrize("name", CURSOR_METHODS[1:])
def test_a_method_that_was_replaced_on_one_connection_is_called(
    name: str, shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(shards, 0)
    seen: list[str] = []
    method = observed(name, seen)
    monkeypatch.setattr(shards[0], name, MethodType(method, shards[0]))
    use(shards, 0)
    assert shards.alias(0) in seen


def test_cursors_are_opened_in_the_short_way(shards: Shards) -> None:
    """As long as all methods are Django's."""
    use(shards, 0)
    assert opens_as_django(shards[0], super(ShardConnectionMixin, type(shards[0])))


@pytest.mark.parametrize("name", ["fetchone", "fetchall", "close"])
def test_a_package_that_adds_a_method_to_djangos_cursor_sees_each_call(
    name: str, shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def method(self: Any) -> Any:
        seen.append(self.db.alias)
        return getattr(self.cursor, name)()

    monkeypatch.setattr(CursorWrapper, name, method, raising=False)
    cursor = shards[0].cursor()
    cursor.execute("SELECT 1")
    getattr(cursor, name)()
    assert seen == [shards.alias(0)]


@pytest.mark.parametrize("name", ["fetchone", "fetchall", "close"])
def test_a_package_that_replaces_the_look_up_of_djangos_cursor_sees_each_call(
    name: str, shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    original = CursorWrapper.__getattr__

    @wraps(original)
    def look_up(self: Any, attribute: str) -> Any:
        seen.append(attribute)
        return original(self, attribute)

    monkeypatch.setattr(CursorWrapper, "__getattr__", look_up)
    cursor = shards[0].cursor()
    cursor.execute("SELECT 1")
    getattr(cursor, name)()
    assert name in seen


def test_connection_of_is_a_shorter_look_up(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    alias = shards.alias(0)
    first = shards[0]
    assert connection_of(alias) is first
    del connections[alias]
    other = connection_of(alias)
    assert other is not first
    assert connections[alias] is other
    shards.group.shards.forget(other)
    shards.group.shards.add(first)
    assert connection_of(alias) is first
    with pytest.raises(ConnectionDoesNotExist):
        connection_of("nowhere")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: connection_of(alias) is connections[alias] is not first).result()

    async def look_up() -> Any:
        return connection_of(alias), connections[alias]

    for_loop, by_django = asyncio.run(look_up())
    assert for_loop is by_django is not first
    seen: list[str] = []
    original = type(connections).__getitem__

    @wraps(original)
    def get(self: Any, name: str) -> Any:
        seen.append(name)
        return original(self, name)

    monkeypatch.setattr(type(connections), "__getitem__", get)
    assert connection_of(alias) is first
    assert seen == [alias]


def test_an_error_of_the_driver_is_djangos(shards: Shards) -> None:
    for _ in range(2):
        with shards[0].cursor() as cursor:
            with pytest.raises(DatabaseError) as caught:
                cursor.execute("SELECT nowhere")
            assert isinstance(caught.value.__cause__, shards[0].Database.Error)
            assert shards[0].errors_occurred
            cursor.execute("SELECT 1")
            assert cursor.fetchone() == (1,)
            assert list(cursor.fetchall()) == []


def test_connections_are_closed_after_the_request(shards: Shards) -> None:
    for number in (0, 1):
        shards[number].settings_dict["CONN_MAX_AGE"] = number * 3600
        shards[number].close()
        use(shards, number)
    close_old_connections()
    assert shards[0].connection is None
    assert shards[1].connection is not None


def test_connection_that_outlives_its_age_while_not_used(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    for number in (0, 1):
        shards[number].settings_dict["CONN_MAX_AGE"] = 60 + 60 * number
        shards[number].close()
        use(shards, number)
    close_old_connections()
    assert shards[0].connection is not None
    now += 61
    close_old_connections()
    assert shards[0].connection is None
    assert shards[1].connection is not None
    now += 61
    close_old_connections()
    assert shards[1].connection is None


def test_request_signals_visit_only_what_was_used(shards: Shards) -> None:
    for number in range(4):
        shards[number].settings_dict["CONN_MAX_AGE"] = None
        use(shards, number)
    close_old_connections()
    visits: list[int] = []
    for number in range(4):
        shards[number].close_if_unusable_or_obsolete = lambda n=number: visits.append(n)
    use(shards, 2)
    use(shards, 2)
    close_old_connections()
    close_old_connections()
    assert visits == [2]


def test_transaction_left_open_is_closed_after_the_request(shards: Shards) -> None:
    shards[0].set_autocommit(False)
    shards.add(0, 1)
    assert shards.group.open_transactions() == {shards.alias(0)}
    close_old_connections()
    assert shards[0].connection is None
    shards.group.set_autocommit(False)
    shards.add(1, 1)
    close_old_connections()
    assert shards.rows(0) == shards.rows(1) == []
    shards.add(1, 2)
    assert shards.rows(1) == [2]


def test_each_thread_has_its_own(shards: Shards) -> None:
    found: list[Any] = []

    def run() -> None:
        try:
            shards.add(0, 1)
            found.extend([shards[0], shards.group])
        finally:
            connections.close_all()

    with atomic(using=GROUP):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert found[0] is not shards[0]
        assert found[0].group_wrapper is found[1]
        assert found[1] is not shards.group
    assert shards.rows(0) == [1]


def test_copy_is_apart(shards: Shards) -> None:
    other = shards[0].copy()
    with atomic(using=GROUP):
        with other.cursor() as cursor:
            cursor.execute("INSERT INTO thing (value) VALUES (1)")
        assert shards.rows(0) == [1]
    other.close()
    assert other.shard is None
