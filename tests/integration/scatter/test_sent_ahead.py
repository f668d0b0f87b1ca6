"""A few rows by their keys: one thread sends to all nodes of MariaDB, then receives from each."""

from __future__ import annotations

import gc
import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier
from typing import Any, ClassVar

import MySQLdb
import pytest
from django.db import OperationalError, connections
from django.db.backends.utils import CursorWrapper
from django.db.models.signals import post_init

from sharded_orm import runtime, scatter
from sharded_orm.backends.mysql.node_cursor import NodeCursor
from sharded_orm.backends.pool import pools
from sharded_orm.exceptions import ScatterError
from sharded_orm.models.plans.id_batch import batch_instances
from sharded_orm.models.plans.instances import InstanceLoader
from sharded_orm.models.sharding.query import ShardedQuery
from sharded_orm.scatter.execute import Executor
from sharded_orm.topology.model import Shard
from tests.integration.scatter.conftest import SHARDS, store
from tests.patience import PATIENCE
from tests.queries.conftest import DATABASES
from tests.samples.models import Sample

pytestmark = [
    pytest.mark.mysql_settings,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]

ALIASES = [f"photos_{number:05d}" for number in SHARDS]
ROWS = sorted((ALIASES[n % len(SHARDS)], n) for n in range(20))
#: The shards of the other node than that of the first shard.
OTHERS = {f"photos_{number:05d}" for number in SHARDS if number >= 8}
Act = Callable[[NodeCursor], None]


@pytest.fixture(autouse=True)
def rows() -> None:
    store([Sample(id=n, owner=n % 5, number=n % 3, name=f"n{n}", data={"n": n}) for n in range(20)])
    # Each node has an idle session now.
    assert read() == ROWS


@pytest.fixture
def last_node_lost(when_sent: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A context manager: the last node is lost when the next read was sent."""

    @contextmanager
    def lost() -> Iterator[list[NodeCursor]]:
        with socket.socket() as nobody, monkeypatch.context() as patched:
            # The port is taken, and nobody listens.
            nobody.bind(("127.0.0.1", 0))

            def lose_node(cursor: NodeCursor) -> None:
                cursor._pool.dispose()
                patched.setitem(cursor._pool.params, "port", nobody.getsockname()[1])
                lose_answer(cursor)

            yield when_sent(lose_node)

    return lost


@pytest.fixture
def when_sent(monkeypatch: pytest.MonkeyPatch) -> Callable[[Act], list[NodeCursor]]:
    """Call a function when a read was sent ahead the next time, before anything is received.

    The function gets the cursor that waits for the last node. The list contains it afterwards.
    """

    def prepare(act: Act) -> list[NodeCursor]:
        run, waiting = Executor._run, list[NodeCursor]()

        def act_first(executor: Executor, *arguments: Any) -> Any:
            if executor._sent and not waiting:
                waiting.append(list(executor._sent.values())[-1])
                act(waiting[0])
            return run(executor, *arguments)

        monkeypatch.setattr(Executor, "_run", act_first)
        return waiting

    return prepare


def ids_by_shard(numbers: tuple[int, ...] = SHARDS) -> dict[Shard, list[int]]:
    group = runtime.group("photos")
    return {
        group.shard(number): [n for n in range(20) if n % len(SHARDS) == SHARDS.index(number)]
        for number in numbers
    }


def read(numbers: tuple[int, ...] = SHARDS) -> list[tuple[str, int]]:
    query = ShardedQuery(Sample)
    query.clear_ordering(force=True)
    return sorted(
        (alias, row[0]) for alias, row in scatter.fetch_by_key(query, ids_by_shard(numbers))
    )


def lose_answer(cursor: NodeCursor) -> None:
    """Take the answer from the cursor's session, and break the session off."""
    assert cursor._session is not None
    with socket.fromfd(cursor._session.raw.fileno(), socket.AF_INET, socket.SOCK_STREAM) as line:
        assert line.recv(100_000)
        line.shutdown(socket.SHUT_RDWR)


def test_keys_are_written_as_the_driver_writes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[tuple[Any, bytes]] = []

    def compare(executor: Executor, *arguments: Any) -> Any:
        for statement, cursor in executor._sent.items():
            bound = cursor._session.bind(*statement.sql())
            texts.append((cursor._statement[0].encode(), bound))
        return run(executor, *arguments)

    run = Executor._run
    monkeypatch.setattr(Executor, "_run", compare)
    assert read() == ROWS
    assert texts
    assert all(text == bound for text, bound in texts)


@pytest.mark.parametrize("name", ["execute", "_execute_with_wrappers", "_execute"])
def test_a_package_that_replaces_a_method_of_djangos_cursor_sees_each_statement(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packages that trace statements do so."""
    original = getattr(CursorWrapper, name)
    seen: list[str] = []

    def traced(self: Any, sql: str, *args: Any, **kwargs: Any) -> Any:
        seen.append(sql)
        return original(self, sql, *args, **kwargs)

    monkeypatch.setattr(CursorWrapper, name, traced)
    assert read() == ROWS
    assert len(seen) == len({runtime.shard("photos", number).node for number in SHARDS})


def test_a_read_that_loses_its_session_is_repeated(when_sent: Any) -> None:
    waiting = when_sent(lose_answer)
    retries = sum(pool.stats.retries for pool in pools())
    assert read() == ROWS
    assert len(waiting) == 1
    assert sum(pool.stats.retries for pool in pools()) == retries + 1
    assert read() == ROWS


def test_a_node_that_is_lost_fails_its_shards(last_node_lost: Any) -> None:
    with last_node_lost() as waiting, pytest.raises(ScatterError) as caught:
        read()
    assert waiting
    assert caught.value.failures.keys() == OTHERS
    assert read() == ROWS


@pytest.mark.parametrize("is_watched", [False, True])
def test_no_signal_tells_of_rows_if_a_later_node_fails(
    last_node_lost: Any, is_watched: bool
) -> None:
    """The rows of the first node are instances already when the last node fails."""

    def watch(instance: Any, **_: Any) -> None:
        seen.append(instance.pk)

    seen: list[int] = []
    queryset = Sample._default_manager.all()
    if is_watched:
        post_init.connect(watch, sender=Sample)
    try:
        with last_node_lost() as waiting, pytest.raises(ScatterError) as caught:
            batch_instances(queryset, ids_by_shard())
        assert waiting
        assert not seen
        assert caught.value.failures.keys() == OTHERS
        loaded = batch_instances(queryset, ids_by_shard())
    finally:
        post_init.disconnect(watch, sender=Sample)
    assert sorted((each._state.db, each.pk) for each in loaded) == ROWS
    assert len(seen) == (len(ROWS) if is_watched else 0)


class Decoder(json.JSONDecoder):
    """Remembers the texts that it has read."""

    seen: ClassVar[list[str]] = []

    def decode(self, text: str, *args: Any) -> Any:
        self.seen.append(text)
        return super().decode(text, *args)


def test_no_decoder_of_a_project_reads_rows_if_a_later_node_fails(
    last_node_lost: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The converter of a JSONField is Django's, but it calls the class that the project has set."""
    monkeypatch.setattr(Sample._meta.get_field("data"), "decoder", Decoder)
    monkeypatch.setattr(Decoder, "seen", [])
    queryset = Sample._default_manager.all()
    with last_node_lost() as waiting, pytest.raises(ScatterError):
        batch_instances(queryset, ids_by_shard())
    assert waiting
    assert not Decoder.seen
    loaded = batch_instances(queryset, ids_by_shard())
    assert all(each.data == {"n": each.pk} for each in loaded)
    assert len(Decoder.seen) == len(ROWS)


def test_an_error_of_a_node_comes_before_that_of_a_value(
    last_node_lost: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One database converts no value before it has answered."""

    def refuse(*_: Any) -> Any:
        raise ValueError("refused")

    monkeypatch.setattr(InstanceLoader, "loaded", refuse)
    queryset = Sample._default_manager.all()
    with last_node_lost() as waiting, pytest.raises(ScatterError) as caught:
        batch_instances(queryset, ids_by_shard())
    assert waiting
    assert caught.value.failures.keys() == OTHERS
    with pytest.raises(ValueError, match="refused"):
        batch_instances(queryset, ids_by_shard())


@pytest.mark.parametrize("kind", [KeyboardInterrupt, TimeoutError])
def test_an_interrupt_between_two_nodes_leaves_no_answer_to_others(
    when_sent: Any, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    """The other node's answer is not read, so its session is closed."""

    def interrupt(*_: Any) -> Any:
        raise kind

    sessions: list[Any] = []
    when_sent(lambda cursor: sessions.append(cursor._session))
    with monkeypatch.context() as patched:
        patched.setattr(InstanceLoader, "loaded", interrupt)
        with pytest.raises(kind) as caught:
            batch_instances(Sample._default_manager.all(), ids_by_shard())
    # While somebody has the traceback, the frames are alive. The session must not wait for their end.
    assert caught.tb is not None
    assert sessions[0].retired
    assert read() == ROWS


def test_an_interrupted_read_leaves_no_answer_to_others(when_sent: Any) -> None:
    def interrupt(cursor: NodeCursor) -> None:
        sessions.append(cursor._session)
        raise KeyboardInterrupt

    sessions: list[Any] = []
    when_sent(interrupt)
    with pytest.raises(KeyboardInterrupt):
        read()
    assert sessions[0].retired
    for _ in range(3):
        assert read() == ROWS


def test_an_error_while_a_cursor_is_closed_leaves_no_other_cursor_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail_once(cursor: NodeCursor) -> None:
        close(cursor)
        closed.append(cursor)
        if len(closed) == 1:
            raise MySQLdb.OperationalError("refused")

    close, closed = NodeCursor.close, list[NodeCursor]()
    with monkeypatch.context() as patched:
        patched.setattr(NodeCursor, "close", fail_once)
        with pytest.raises(OperationalError, match="refused"):
            read()
    assert len(closed) == len({runtime.shard("photos", number).node for number in SHARDS})
    assert read() == ROWS


def test_other_statements_meanwhile_get_their_own_answers(when_sent: Any) -> None:
    def ask_others(cursor: NodeCursor) -> None:
        gc.collect()
        for alias in ALIASES:
            ids = Sample._default_manager.using(alias).order_by("id").values_list("id", flat=True)
            assert list(ids) == [n for of, n in ROWS if of == alias]
        assert read() == ROWS

    waiting = when_sent(ask_others)
    assert read() == ROWS
    assert waiting


def test_with_a_limit_of_sessions_threads_do_not_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def meet(executor: Executor, *arguments: Any) -> Any:
        if executor._sent:
            # Each thread holds a session that the other needs.
            both.wait(PATIENCE)
        return run(executor, *arguments)

    def read_in_thread(numbers: tuple[int, ...]) -> Any:
        try:
            return [read(numbers) for _ in range(10)]
        finally:
            for alias in ("photos", *ALIASES):
                connections[alias].close()

    run, both = Executor._run, Barrier(2)
    monkeypatch.setattr(Executor, "_run", meet)
    for node in runtime.topology().nodes.values():
        monkeypatch.setitem(node, "POOL", {"MAX": 1, "TIMEOUT": 10})
    with ThreadPoolExecutor(2) as threads:
        for found in threads.map(read_in_thread, (SHARDS, SHARDS[::-1])):
            assert found == [ROWS] * 10
