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
from django.db.backends.utils import CursorWrapper
from django.test.utils import CaptureQueriesContext

from sharded_orm import runtime
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
    seen: list[str] = []
    kind = type(shard) if name in OVERRIDDEN else BaseDatabaseWrapper
    original = getattr(kind, name)

    @wraps(original)
    def method(self: Any, *args: Any) -> Any:
        seen.append(name)
        return original(self, *args)

    if place == "class":
        monkeypatch.setattr(kind, name, method)
    else:
        monkeypatch.setattr(shard, name, lambda *args: method(shard, *args))
    assert results() == RESULTS
    assert plain == [False] * len(READS)
    assert len(seen) >= len(READS)
    monkeypatch.undo()
    assert shard.read_rows("SELECT 1", ()) == ((1,),)


@pytest.mark.parametrize("name", OF_CURSORS)
def test_a_replaced_method_of_cursors_is_called(
    name: str, plain: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    original = getattr(CursorWrapper, name)

    @wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(name)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(CursorWrapper, name, method)
    assert results() == RESULTS
    assert plain == [False] * len(READS)
    assert len(seen) >= len(READS)


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


def test_errors_are_those_of_a_cursor(shard: Any) -> None:
    sql = "SELECT nothing FROM nowhere WHERE id = %s"
    with pytest.raises(ProgrammingError) as by_cursor, shard.cursor() as cursor:
        cursor.execute(sql, (1,))
    shard.errors_occurred = False
    with pytest.raises(ProgrammingError) as caught:
        shard.read_rows(sql, (1,))
    assert caught.value.args == by_cursor.value.args
    assert caught.value.__notes__ == by_cursor.value.__notes__
    assert type(caught.value.__cause__) is type(by_cursor.value.__cause__)
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


def test_a_session_that_the_server_has_closed_is_replaced(shard: Any) -> None:
    [[number]] = shard.read_rows("SELECT CONNECTION_ID()", ())
    other = shard.node_pool.lease_new()
    other.run(b"KILL %d" % number)
    shard.node_pool.release(other)
    for _ in range(3):
        assert results() == RESULTS
