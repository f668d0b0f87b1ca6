"""Reads by plans on MariaDB without a cursor object, and everything that must still see them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
from django.core.exceptions import SynchronousOnlyOperation
from django.db import ProgrammingError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.mysql.base import DatabaseWrapper as MySQLWrapper
from django.db.backends.utils import CursorWrapper
from django.test.utils import CaptureQueriesContext

from sharded_orm import runtime
from sharded_orm.backends.mysql.leased_cursor import RowReader
from sharded_orm.exceptions import ShardDatabaseMissing
from tests.queries.conftest import DATABASES
from tests.samples.models import Sample

pytestmark = [
    pytest.mark.mysql_settings,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]

READS: list[Callable[[], Any]] = [
    lambda: Sample.objects.get(owner=1, pk=1).name,
    lambda: [row.name for row in Sample.objects.filter(owner=1).order_by("pk")],
    lambda: Sample.objects.filter(owner=1).count(),
    lambda: Sample.objects.filter(owner=1).exists(),
    lambda: Sample.objects.filter(owner=1, pk=7).exists(),
    lambda: list(Sample.objects.filter(owner=1).values_list("name", flat=True).order_by("pk")),
]
RESULTS: list[Any] = ["one", ["one", "two"], 2, True, False, ["one", "two"]]
OF_CONNECTIONS = [
    "cursor", "_cursor", "make_cursor", "_prepare_cursor", "ensure_connection", "validate_thread_sharing",
    "close_if_health_check_failed", "validate_no_broken_transaction", "create_cursor",
]  # fmt: skip
# The classes of this package do not always call Django's method.
OVERRIDDEN = {"make_cursor", "create_cursor", "validate_no_broken_transaction"}
OF_CURSORS = [
    "__init__",
    "__getattribute__",
    "execute",
    "_execute",
    "_execute_with_wrappers",
    "__enter__",
    "__exit__",
    "__getattr__",
]


@pytest.fixture(autouse=True)
def shard() -> Any:
    """The connection object of a shard whose rows are read by plans."""
    for number, name in enumerate(("one", "two"), 1):
        Sample.objects.create(id=number, owner=1, number=number, name=name)
    for _ in range(3):
        assert results() == RESULTS
    located = runtime.locate("photos", 1)
    assert located is not None
    return connections[located.alias]


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch, shard: Any) -> list[bool]:
    """For each read by a plan, whether it needed no cursor."""
    kinds: list[bool] = []
    method = type(shard).read_rows

    def read_rows(self: Any, sql: str, params: tuple[Any, ...]) -> Any:
        rows = method(self, sql, params)
        kinds.append(rows is not None)
        return rows

    monkeypatch.setattr(type(shard), "read_rows", read_rows)
    return kinds


def results() -> list[Any]:
    return [read() for read in READS]


def replace_method_of_connections(
    monkeypatch: pytest.MonkeyPatch, shard: Any, name: str, place: str
) -> list[str]:
    """Replace a method, as another package may do. Return the list to which each call is added.

    :param place: "class", or "object" for the connection object of the shard only.
    """
    calls: list[str] = []
    kind = type(shard) if name in OVERRIDDEN else BaseDatabaseWrapper
    original = getattr(kind, name)

    @wraps(original)
    def method(self: Any, *args: Any) -> Any:
        calls.append(name)
        return original(self, *args)

    if place == "class":
        monkeypatch.setattr(kind, name, method)
    else:
        monkeypatch.setattr(shard, name, lambda *args: method(shard, *args))
    return calls


def replace_method_of_cursors(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """Do the same with a method of Django's cursors."""
    calls: list[str] = []
    original = getattr(CursorWrapper, name)

    @wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(CursorWrapper, name, method)
    return calls


def test_reads_need_no_cursor(
    plain: list[bool], shard: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert results() == RESULTS
    assert plain == [True] * len(READS)
    # A shard that was dropped from the thread's connections is added again.
    shard.group_wrapper.shards.wrappers.pop(shard.alias)
    assert results() == RESULTS
    assert shard.alias in shard.group_wrapper.shards.wrappers


@pytest.mark.parametrize("name", OF_CONNECTIONS)
@pytest.mark.parametrize("place", ["class", "object"])
def test_a_replaced_method_of_connections_is_called(
    name: str, place: str, shard: Any, plain: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = replace_method_of_connections(monkeypatch, shard, name, place)
    assert results() == RESULTS
    assert plain == [False] * len(READS)
    assert len(calls) >= len(READS)
    monkeypatch.undo()
    assert shard.read_rows("SELECT 1", ()) == ((1,),)


def test_methods_behind_those_of_the_package_are_called(
    shard: Any, plain: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a package adds a method to Django's MySQL class, or a project to a base class of its engine."""
    seen: list[str] = []

    def cursor(self: Any, name: str | None = None) -> Any:
        seen.append(self.alias)
        return BaseDatabaseWrapper._cursor(self, name)  # type: ignore[attr-defined]  # missing in Django's type stubs

    with monkeypatch.context() as patch:
        patch.setattr(MySQLWrapper, "_cursor", cursor, raising=False)
        assert results() == RESULTS
    assert plain == [False] * len(READS)
    assert seen == [shard.alias] * len(READS)
    with monkeypatch.context() as patch:
        patch.setattr(MySQLWrapper, "queries_logged", property(lambda _: True), raising=False)
        shard.queries_log.clear()
        assert results() == RESULTS
    assert len(shard.queries_log) == len(READS)
    for body in ({"_cursor": cursor}, {"queries_logged": property(lambda _: True)}):
        behind = type("Behind", (BaseDatabaseWrapper,), body)
        monkeypatch.setattr(shard, "__class__", type("Engine", (type(shard), behind), {}))
        assert shard.read_rows("SELECT 1", ()) is None
        monkeypatch.undo()
    assert shard.read_rows("SELECT 1", ()) == ((1,),)


@pytest.mark.parametrize("name", OF_CURSORS)
def test_a_replaced_method_of_cursors_is_called(
    name: str, plain: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = replace_method_of_cursors(monkeypatch, name)
    assert results() == RESULTS
    assert plain == [False] * len(READS)
    assert len(calls) >= len(READS)


@pytest.mark.parametrize("name", ["fetchall", "fetchone", "close"])
def test_a_method_that_a_package_adds_to_cursors_is_called(
    name: str, plain: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def method(self: Any) -> Any:
        seen.append(name)
        return getattr(self.cursor, name)()

    monkeypatch.setattr(CursorWrapper, name, method, raising=False)
    assert results() == RESULTS
    assert plain == [False] * len(READS)
    assert seen


@pytest.mark.parametrize("alias", ["photos", None])
def test_wrappers_and_the_query_log_see_each_read(
    alias: str | None, shard: Any, plain: list[bool]
) -> None:
    observed = shard if alias is None else connections[alias]
    seen: list[str] = []

    def wrapper(execute: Any, sql: str, *args: Any) -> Any:
        seen.append(sql)
        return execute(sql, *args)

    with observed.execute_wrapper(wrapper):
        assert results() == RESULTS
    with CaptureQueriesContext(observed) as queries:
        assert results() == RESULTS
    assert len(seen) == len(queries) == len(READS)
    assert not any(plain)


def test_transactions_and_event_loops_use_cursors(shard: Any, plain: list[bool]) -> None:
    for using in ("photos", shard.alias):
        with transaction.atomic(using=using):
            assert results() == RESULTS
    assert not any(plain)

    async def read() -> Any:
        return Sample.objects.filter(owner=1).count()

    with pytest.raises(SynchronousOnlyOperation):
        asyncio.run(read())

    async def read_by_twin() -> Any:
        return await Sample.objects.filter(owner=1).acount()

    assert asyncio.run(read_by_twin()) == 2


def chain(error: BaseException | None) -> list[Any]:
    """Each exception in the context of ``error``, with all that a traceback shows of it."""
    errors: list[Any] = []
    while error is not None:
        cause, notes = type(error.__cause__), getattr(error, "__notes__", None)
        errors.append((type(error), error.args, cause, error.__suppress_context__, notes))
        error = error.__context__
    return errors


def test_errors_are_those_of_a_cursor(shard: Any) -> None:
    sql = "SELECT nothing FROM nowhere WHERE id = %s"
    with pytest.raises(ProgrammingError) as by_cursor, shard.cursor() as cursor:
        cursor.execute(sql, (1,))
    shard.errors_occurred = False
    with pytest.raises(ProgrammingError) as caught:
        shard.read_rows(sql, (1,))
    assert caught.value.args == by_cursor.value.args
    assert chain(caught.value) == chain(by_cursor.value)
    assert shard.errors_occurred
    assert shard.read_rows("SELECT %s", (1,)) == ((1,),)
    with pytest.raises(ProgrammingError, match="not enough arguments"):
        shard.read_rows("SELECT %s, %s", (1,))
    schema, shard.connection.schema = shard.connection.schema, "missing"
    use, shard.connection.use = shard.connection.use, b"USE missing"
    with pytest.raises(ShardDatabaseMissing):
        shard.read_rows("SELECT 1", ())
    shard.connection.schema, shard.connection.use = schema, use
    assert shard.read_rows("SELECT DATABASE()", ()) == ((schema,),)


@pytest.mark.parametrize("is_handling", [False, True])
@pytest.mark.parametrize("sql", ["SELECT 1 AS `get_lock` FROM nowhere", "SELECT ("])
def test_an_error_has_the_context_of_a_cursor_error(
    sql: str, is_handling: bool, shard: Any
) -> None:
    def by_cursor() -> None:
        with shard.cursor() as cursor:
            cursor.execute(sql, ())

    chains = []
    for read in (lambda: shard.read_rows(sql, ()), by_cursor):
        with pytest.raises(ProgrammingError) as caught:
            if is_handling:
                try:
                    raise KeyError(1)
                except KeyError:
                    read()
            else:
                read()
        chains.append(chain(caught.value))
        shard.close()
        with shard.cursor():
            pass  # connects
    assert chains[0] == chains[1]


def test_an_interrupted_read_is_not_repeated(shard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if a name in the statement makes it one that may leave state in its session."""
    original = RowReader._fetch_result
    interrupts = [KeyboardInterrupt]

    def fetch(self: Any, session: Any) -> None:
        original(self, session)
        if interrupts:
            raise interrupts.pop()

    monkeypatch.setattr(RowReader, "_fetch_result", fetch)
    sql = "SELECT `get_lock` FROM (SELECT 1 AS `get_lock`) AS t"
    with pytest.raises(KeyboardInterrupt):
        shard.read_rows(sql, ())
    assert shard.read_rows(sql, ()) == ((1,),)


def test_a_session_that_the_server_has_closed_is_replaced(shard: Any) -> None:
    [[number]] = shard.read_rows("SELECT CONNECTION_ID()", ())
    other = shard.node_pool.lease_new()
    other.run(b"KILL %d" % number)
    shard.node_pool.release(other)
    for _ in range(3):
        assert results() == RESULTS
