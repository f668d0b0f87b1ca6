"""The number of connections, their age, and who may use them."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.db import DatabaseError, OperationalError, connections, transaction

from sharded_orm.exceptions import PoolTimeout
from tests.integration.mysql.conftest import COUNT, Node
from tests.patience import PATIENCE


@pytest.fixture
def configured(node: Node) -> Iterator[Any]:
    """Change the settings of all aliases of the node."""

    def change(**settings: Any) -> Node:
        for alias in node.aliases:
            connections[alias].close()
            connections[alias].settings_dict.update(settings)
            connections[alias]._node_pool = None
        return node

    yield change
    node.pool.dispose()


def test_threads_not_shards_decide_how_many(node: Node) -> None:
    threads = 8
    barrier = threading.Barrier(threads)

    def work(thread: int) -> None:
        barrier.wait(PATIENCE)
        for turn in range(60):
            number = (thread + turn) % COUNT
            assert node.run(number, "SELECT DISTINCT shard FROM item") == [(number,)]
            if turn % 7 == 0:
                with transaction.atomic(using=f"t_{number}"):
                    node.run(number, "UPDATE item SET value = 'x' WHERE id = 1")
        for alias in node.aliases:
            connections[alias].close()

    with ThreadPoolExecutor(threads) as executor:
        list(executor.map(work, range(threads)))
    assert node.pool.size <= threads
    assert node.pool.size == node.pool.idle
    while len(node.sessions()) > threads:
        pass  # the server has not noticed yet that sessions of an earlier test are closed


def test_a_thread_that_ends_without_closing_gives_back_what_it_held(node: Node) -> None:
    def work() -> None:
        connection = connections["t_0"]
        connection.set_autocommit(False)
        node.run(0, "UPDATE item SET value = 'x' WHERE id = 1")
        del connections["t_0"]

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    gc.collect()
    assert node.pool.size == node.pool.idle
    node.run(0, "UPDATE item SET value = 'y' WHERE id = 1")
    assert node.value(0) == "y"


def test_a_bound_is_a_clear_error_and_heals(configured: Any) -> None:
    node = configured(POOL={"MAX": 2, "TIMEOUT": 0.05})
    with transaction.atomic(using="t_0"), transaction.atomic(using="t_1"):
        node.run(0, "SELECT 1")
        node.run(1, "SELECT 1")
        with pytest.raises(PoolTimeout, match="All 2 connections"):
            node.run(2, "SELECT 1")
        with pytest.raises(OperationalError), transaction.atomic(using="t_2"):
            node.run(2, "SELECT 1")
    assert node.run(2, "SELECT DATABASE()") == [("t_2",)]
    for _ in range(3):
        node.kill(node.session_of(0))
        with pytest.raises(OperationalError), transaction.atomic(using="t_0"):
            node.run(0, "UPDATE item SET value = 'x'")
            node.kill(node.session_of(0))
            node.run(0, "SELECT 1")
        node.run(0, "SET @a = 1")
        connections["t_0"].close()
    with transaction.atomic(using="t_0"), transaction.atomic(using="t_1"):
        node.run(0, "SELECT 1")
        node.run(1, "SELECT 1")


def test_max_age_zero_closes_at_the_end_of_the_request(configured: Any) -> None:
    node = configured(CONN_MAX_AGE=0)
    session = node.session_of(0)
    assert node.session_of(1) == session
    connections["t_1"].close_if_unusable_or_obsolete()
    assert connections["t_1"].connection is None
    assert node.pool.size == 0
    assert node.session_of(0) != session


def test_without_a_max_age_sessions_stay(configured: Any) -> None:
    node = configured(CONN_MAX_AGE=None)
    session = node.session_of(0)
    for number in range(COUNT):
        connections[f"t_{number}"].close_if_unusable_or_obsolete()
    assert node.session_of(1) == session


def test_a_session_in_a_transaction_survives_the_request_of_another_thread(configured: Any) -> None:
    node = configured(CONN_MAX_AGE=0)
    with transaction.atomic(using="t_0"):
        node.run(0, "UPDATE item SET value = 'x' WHERE id = 1")

        def other() -> None:
            node.run(1, "SELECT 1")
            connections["t_1"].close_if_unusable_or_obsolete()

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert node.value(0) == "x"


def test_health_checks_ping_a_session_once_per_request(configured: Any, packets: list[str]) -> None:
    node = configured(CONN_HEALTH_CHECKS=True)
    for number in range(COUNT):
        node.run(number, "SELECT 1")
    for number in range(COUNT):
        connections[f"t_{number}"].close_if_unusable_or_obsolete()
    session = node.pool._idle[-1]
    assert session.suspect
    for number in range(COUNT):
        node.run(number, "SELECT 1")
    assert not session.suspect


def test_an_unusable_alias_is_closed_at_the_end_of_the_request(node: Node) -> None:
    with pytest.raises(OperationalError):
        node.run(0, "SELECT 1 FROM item WHERE nonsense")
    connections["t_0"].close_if_unusable_or_obsolete()
    assert connections["t_0"].connection is not None
    node.run(0, "SET @a = 1")
    node.kill(node.session_of(0))
    with pytest.raises(OperationalError):
        node.run(0, "SELECT 1")
    connections["t_0"].close_if_unusable_or_obsolete()
    assert connections["t_0"].connection is None


def test_a_forgotten_autocommit_is_closed_at_the_end_of_the_request(node: Node) -> None:
    node[0].set_autocommit(False)
    node.run(0, "UPDATE item SET value = 'x' WHERE id = 1")
    connections["t_0"].close_if_unusable_or_obsolete()
    assert node.value(0) is None
    assert node.run(1, "SELECT @@autocommit") == [(1,)]


def test_wrappers_belong_to_their_thread(node: Node) -> None:
    wrapper = node[0]
    wrapper.ensure_connection()
    errors: list[Exception] = []

    def other() -> None:
        try:
            wrapper.cursor()
        except DatabaseError as exc:
            errors.append(exc)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert "can only be used in that same thread" in str(errors[0])


def test_async_code(node: Node) -> None:
    def read(number: int) -> Any:
        try:
            return node.run(number, "SELECT DISTINCT shard FROM item")
        finally:
            connections[f"t_{number}"].close()

    async def main() -> list[Any]:
        with pytest.raises(SynchronousOnlyOperation):
            node[0].cursor()
        return [await sync_to_async(read)(number) for number in range(COUNT)]

    assert asyncio.run(main()) == [[(number,)] for number in range(COUNT)]


def test_a_wrapper_knows_when_it_is_idle(node: Node) -> None:
    assert node[0].is_idle()
    node.run(0, "SELECT 1")
    assert node[0].is_idle()
    with transaction.atomic(using="t_0"):
        assert not node[0].is_idle()
    assert node[0].is_idle()


def test_closing_and_connecting_again_costs_no_session(node: Node) -> None:
    """With thousands of aliases, each of them opens and closes often."""
    node.run(0, "SELECT 1")
    opened = node.pool.stats.opened
    for _ in range(100):
        connections["t_0"].close()
        connections["t_0"].ensure_connection()
    assert node.pool.stats.opened == opened
    assert node.pool.size == 1
