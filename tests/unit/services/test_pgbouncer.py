"""The private PgBouncers of the tests; ``test_mariadb`` tests the common parts."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.services.pgbouncer import POOL_SIZE, PgBouncer
from tests.services.postgresql import DATABASE, Address

psycopg = pytest.importorskip("psycopg")


def connect(address: Address, database: str = DATABASE):
    # The pooler hands out another session for each transaction.
    return contextlib.closing(
        psycopg.connect(**address.psycopg(database), autocommit=True, prepare_threshold=None)
    )


def test_many_clients_share_few_sessions(pgbouncer_nodes):
    for address in pgbouncer_nodes:
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(connect(address)) for _ in range(3 * POOL_SIZE)]
            pids = {client.execute("SELECT pg_backend_pid()").fetchone() for client in clients}
            assert 1 <= len(pids) <= POOL_SIZE


def test_a_session_is_shared_between_transactions(own_pgbouncer: PgBouncer):
    with PgBouncer(own_pgbouncer._server, default_pool_size="1") as pooler:
        with connect(pooler.address) as one, connect(pooler.address) as two:
            one.execute("SET search_path TO left_behind")
            assert two.execute("SHOW search_path").fetchone() == ("left_behind",)


def test_each_is_in_front_of_its_own_server(pgbouncer_nodes, postgresql_nodes):
    system = "SELECT system_identifier FROM pg_control_system()"
    for pooler, server in zip(pgbouncer_nodes, postgresql_nodes, strict=True):
        with connect(pooler) as by_pooler, connect(server) as directly:
            assert by_pooler.execute(system).fetchone() == directly.execute(system).fetchone()


def test_a_killed_pooler_comes_back_on_its_port(own_pgbouncer: PgBouncer):
    address = own_pgbouncer.address
    with connect(address) as client:
        own_pgbouncer.kill()
        with pytest.raises(psycopg.OperationalError):
            client.execute("SELECT 1")
    assert not own_pgbouncer.is_ready()
    own_pgbouncer.start()
    assert own_pgbouncer.address == address
    with connect(address) as client:
        assert client.execute("SELECT 1").fetchone() == (1,)


def test_it_does_not_run_as_root(own_pgbouncer: PgBouncer):
    assert Path(f"/proc/{own_pgbouncer.pid}").stat().st_uid != 0
