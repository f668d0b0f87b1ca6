"""save() by plans on MariaDB without a cursor object, and everything that must still see it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from django.core.exceptions import SynchronousOnlyOperation
from django.db import (
    DataError,
    OperationalError,
    ProgrammingError,
    connections,
    transaction,
)
from django.db.backends.signals import connection_created
from django.db.transaction import TransactionManagementError
from django.test.utils import CaptureQueriesContext

from sharded_orm import runtime
from sharded_orm.backends.group import relocation
from sharded_orm.backends.mysql.leased_cursor import LeasedCursor, RowWriter
from sharded_orm.backends.write_hooks import compiled_update
from sharded_orm.exceptions import ShardDatabaseMissing
from tests.integration.mysql.test_plain_reads import (
    OF_CONNECTIONS,
    OF_CURSORS,
    chain,
    replace_method_of_connections,
    replace_method_of_cursors,
)
from tests.queries.conftest import DATABASES
from tests.samples.models import Sample

pytestmark = [
    pytest.mark.mysql_settings,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]

NAMES = ["first", "second", "third"]
# Statements that are sent to the shard as they are.
UPDATE = "UPDATE `samples_sample` SET `name` = %s WHERE `id` = %s"
WRITES: list[tuple[str, tuple[Any, ...]]] = [
    ("UPDATE nowhere SET id = %s", (1,)),
    ("UPDATE samples_sample SET (", ()),
    ("UPDATE samples_sample SET number = %s", (10**30,)),
]


@pytest.fixture(autouse=True)
def shard() -> Any:
    """The connection object of a shard whose rows are saved by plans."""
    Sample.objects.create(id=1, owner=1, number=1, name="zero")
    located = runtime.locate("photos", 1)
    assert located is not None
    for _ in range(2):
        assert saved() == NAMES
    return connections[located.alias]


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch, shard: Any) -> list[bool]:
    """For each write by a plan, whether it needed no cursor."""
    kinds: list[bool] = []
    method = type(shard).write_rows

    def write_rows(self: Any, sql: str, params: tuple[Any, ...]) -> int | None:
        changed: int | None = method(self, sql, params)
        kinds.append(changed is not None)
        return changed

    monkeypatch.setattr(type(shard), "write_rows", write_rows)
    return kinds


def saved() -> list[str]:
    """Save the row under several names, and return the names that it then had in the database."""
    row, names = Sample.objects.get(owner=1, pk=1), []
    for name in NAMES:
        row.name = name
        row.save()
        names.append(Sample.objects.get(owner=1, pk=1).name)
    return names


def test_saves_need_no_cursor(plain: list[bool], shard: Any) -> None:
    assert saved() == NAMES
    for using in ("photos", shard.alias):
        with transaction.atomic(using=using):
            assert saved() == NAMES
        with pytest.raises(KeyError), transaction.atomic(using=using):
            Sample.objects.filter(owner=1, pk=1).update(name="undone")
            assert saved() == NAMES
            raise KeyError
        assert Sample.objects.get(owner=1, pk=1).name == NAMES[-1]
    assert plain == [True] * 5 * len(NAMES)
    # A shard that was dropped from the thread's connections is added again.
    shard.group_wrapper.shards.wrappers.pop(shard.alias)
    assert saved() == NAMES
    assert shard.alias in shard.group_wrapper.shards.wrappers


def test_a_shard_joins_the_transaction_of_its_group(plain: list[bool], shard: Any) -> None:
    row = Sample.objects.get(owner=1, pk=1)
    with pytest.raises(KeyError), transaction.atomic(using="photos"):
        row.name = "undone"
        row.save()
        assert plain == [True]
        assert shard.in_atomic_block
        with pytest.raises(IndexError), transaction.atomic(using="photos"):
            row.name = "undone before"
            row.save()
            raise IndexError
        assert Sample.objects.get(owner=1, pk=1).name == "undone"
        raise KeyError
    assert Sample.objects.get(owner=1, pk=1).name == NAMES[-1]
    # A save in a block that must be rolled back is refused, whoever has marked it.
    for using in ("photos", shard.alias):
        with transaction.atomic(using=using):
            row.save()
            transaction.set_rollback(True, using=using)
            with pytest.raises(TransactionManagementError):
                row.save()
    assert Sample.objects.get(owner=1, pk=1).name == NAMES[-1]


@pytest.mark.parametrize("name", OF_CONNECTIONS)
@pytest.mark.parametrize("place", ["class", "object"])
def test_a_replaced_method_of_connections_is_called(
    name: str, place: str, shard: Any, plain: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = replace_method_of_connections(monkeypatch, shard, name, place)
    assert saved() == NAMES
    assert plain == [False] * len(NAMES)
    assert len(calls) >= len(NAMES)


@pytest.mark.parametrize("name", OF_CURSORS)
def test_a_replaced_method_of_cursors_is_called(
    name: str, plain: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = replace_method_of_cursors(monkeypatch, name)
    assert saved() == NAMES
    assert plain == [False] * len(NAMES)
    assert len(calls) >= len(NAMES)


@pytest.mark.parametrize("alias", ["photos", None])
@pytest.mark.parametrize("in_block", [False, True])
def test_wrappers_and_the_query_log_see_each_save(
    alias: str | None, in_block: bool, shard: Any, plain: list[bool]
) -> None:
    observed = shard if alias is None else connections[alias]
    seen: list[str] = []

    def wrapper(execute: Any, sql: str, *args: Any) -> Any:
        seen.append(sql)
        return execute(sql, *args)

    def save() -> None:
        if in_block:
            with transaction.atomic(using=observed.alias):
                assert saved() == NAMES
        else:
            assert saved() == NAMES

    with observed.execute_wrapper(wrapper):
        save()
    with CaptureQueriesContext(observed) as queries:
        save()
    logged = [query["sql"] for query in queries]
    for statements in (seen, logged):
        assert sum("UPDATE" in sql for sql in statements) == len(NAMES)
    assert plain == [False] * 2 * len(NAMES)


def test_event_loops_are_not_blocked(plain: list[bool]) -> None:
    row = Sample.objects.get(owner=1, pk=1)

    async def save() -> None:
        row.save()

    with pytest.raises(SynchronousOnlyOperation):
        asyncio.run(save())

    async def save_by_twin() -> None:
        await row.asave()

    asyncio.run(save_by_twin())


def test_a_wrapper_of_a_new_connection_sees_the_write_that_has_opened_it(
    shard: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, seen = shard.group_wrapper, []
    connect = group.connect

    def publish() -> None:
        # As if another thread publishes other settings just before the shard joins the transaction.
        monkeypatch.setattr(group, "connect", connect)
        shard.settings_dict = {**shard.settings_dict, "CONN_MAX_AGE": 77}
        monkeypatch.setattr(relocation, "generation", relocation.generation + 1)
        connect()

    def wrapper(execute: Any, sql: str, *args: Any) -> Any:
        seen.append(sql)
        return execute(sql, *args)

    def observe(connection: Any, **kwargs: Any) -> None:
        connection.execute_wrappers.append(wrapper)

    connection_created.connect(observe)
    try:
        with transaction.atomic(using="photos"):
            monkeypatch.setattr(group, "connect", publish)
            assert compiled_update.send(shard, UPDATE, ("x", 1)) == 1
        assert seen == [UPDATE]
    finally:
        connection_created.disconnect(observe)
        if wrapper in shard.execute_wrappers:
            shard.execute_wrappers.remove(wrapper)
    assert Sample.objects.get(owner=1, pk=1).name == "x"


def by_cursor(shard: Any, sql: str, params: tuple[Any, ...]) -> int:
    with shard.cursor() as cursor:
        cursor.execute(sql, params)
        return int(cursor.rowcount)


@pytest.mark.parametrize(("sql", "params"), WRITES)
@pytest.mark.parametrize("in_block", [False, True])
@pytest.mark.parametrize("is_handling", [False, True])
def test_errors_are_those_of_a_cursor(
    sql: str, params: tuple[Any, ...], in_block: bool, is_handling: bool, shard: Any
) -> None:
    ways: list[Callable[[], Any]] = [
        lambda: shard.write_rows(sql, params),
        lambda: by_cursor(shard, sql, params),
    ]
    results = []
    for write in ways:
        shard.errors_occurred = False

        def fails(write: Callable[[], Any] = write) -> None:
            if not is_handling:
                write()
            try:
                raise KeyError(1)
            except KeyError:
                write()

        with pytest.raises((ProgrammingError, DataError)) as caught:
            if in_block:
                with transaction.atomic(using=shard.alias):
                    assert shard.write_rows(UPDATE, ("inside", 1)) == 1
                    fails()
            else:
                fails()
        results.append((chain(caught.value), shard.errors_occurred, shard.connection.mode))
        assert Sample.objects.get(owner=1, pk=1).name == NAMES[-1]
    assert results[0] == results[1]
    assert shard.write_rows(UPDATE, ("after", 1)) == 1
    assert shard.write_rows(UPDATE, ("after", 7)) == 0


def test_a_missing_schema_is_named(shard: Any) -> None:
    schema, shard.connection.schema = shard.connection.schema, "missing"
    use, shard.connection.use = shard.connection.use, b"USE missing"
    with pytest.raises(ShardDatabaseMissing):
        shard.write_rows(UPDATE, ("x", 1))
    shard.connection.schema, shard.connection.use = schema, use
    assert shard.write_rows(UPDATE, ("x", 1)) == 1


def test_an_interrupted_write_is_not_repeated(shard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = RowWriter._fetch_result
    calls: list[type[BaseException]] = []

    def fetch(self: Any, session: Any) -> None:
        original(self, session)
        calls.append(KeyboardInterrupt)
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(RowWriter, "_fetch_result", fetch)
    with pytest.raises(KeyboardInterrupt):
        shard.write_rows(UPDATE, ("interrupted", 1))
    assert len(calls) == 1
    assert shard.write_rows(UPDATE, ("x", 1)) == 1


@pytest.mark.parametrize("in_block", [False, True])
def test_a_session_that_the_server_has_closed(shard: Any, in_block: bool) -> None:
    def kill() -> None:
        with shard.cursor() as cursor:
            cursor.execute("SELECT CONNECTION_ID()")
            [[number]] = cursor.fetchall()
        other = shard.node_pool.lease_new()
        other.run(b"KILL %d" % number)
        shard.node_pool.release(other)

    if not in_block:
        kill()
        assert saved() == NAMES  # The pool has another one.
        return
    row = Sample.objects.get(owner=1, pk=1)
    with pytest.raises(OperationalError), transaction.atomic(using=shard.alias):
        row.name = "lost"
        row.save()
        kill()
        row.save()
    assert saved() == NAMES


@pytest.mark.parametrize("in_block", [False, True])
def test_an_error_of_results_that_nobody_reads_is_not_raised(
    shard: Any, in_block: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CursorWrapper.__exit__() suppresses such an error, too."""

    def fetch(self: Any, session: Any) -> None:
        # No server answers an UPDATE by several results. Let the session have others to read.
        session.store_result()
        self.rowcount = session.affected_rows()
        session.raw.query(b"SELECT 1; SELECT nothing")
        session.store_result()
        session.stored = True

    def write(way: Callable[[], Any]) -> None:
        if not in_block:
            assert way() == 1
            return
        with transaction.atomic(using=shard.alias):
            assert way() == 1

    for kind in (LeasedCursor, RowWriter):
        monkeypatch.setattr(kind, "_fetch_result", fetch)
    write(lambda: by_cursor(shard, UPDATE, ("by cursor", 1)))
    write(lambda: shard.write_rows(UPDATE, ("without", 1)))
    monkeypatch.undo()
    assert saved() == NAMES


def test_statements_that_leave_state_use_cursors(shard: Any) -> None:
    sql = "UPDATE samples_sample SET name = GET_LOCK('x', 0) WHERE id = %s"
    assert shard.write_rows(sql, (1,)) is None
    with shard.cursor() as cursor:
        cursor.execute("SELECT GET_LOCK('x', 0)")
    assert shard.write_rows(UPDATE, ("x", 1)) is None  # The session is pinned.
    shard.close()


def test_writes_that_wait_for_the_commit_use_cursors(shard: Any) -> None:
    with transaction.atomic(using=shard.alias), shard.sent_with_commit():
        assert shard.write_rows(UPDATE, ("x", 1)) is None
