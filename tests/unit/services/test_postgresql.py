"""The private PostgreSQL servers of the tests; ``test_mariadb`` tests the common parts."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.services import keeper
from tests.services.postgresql import (
    DATABASE,
    ENVIRONMENT,
    Address,
    PostgreSQLServer,
    addresses_from_environment,
    to_environment,
)
from tests.services.server import runs

psycopg = pytest.importorskip("psycopg")

OWNER = """
import sys
from tests.services.postgresql import servers
with servers(1) as (server,):
    print(server.pid, server._keeper.pid, server.folder, flush=True)
    sys.stdin.read()
"""


def connect(address: Address):
    return contextlib.closing(psycopg.connect(**address.psycopg(), autocommit=True))


def test_shared_servers_are_up(postgresql_nodes):
    systems = set()
    for address in postgresql_nodes:
        with connect(address) as connection:
            systems |= set(connection.execute("SELECT system_identifier FROM pg_control_system()"))
    assert len(systems) == 2


def test_each_has_an_empty_database_for_shards(postgresql_nodes):
    for address in postgresql_nodes:
        with contextlib.closing(psycopg.connect(**address.psycopg(DATABASE))) as connection:
            tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname='public'")
            assert tables.fetchall() == []


def test_addresses_travel_through_the_environment(monkeypatch):
    addresses = [Address("h", 1, "u", "p"), Address("i", 2, "v", "q")]
    for variable, value in to_environment(addresses).items():
        monkeypatch.setenv(variable, value)
    assert addresses_from_environment() == addresses
    monkeypatch.delenv(ENVIRONMENT)
    assert addresses_from_environment() == []


def test_a_killed_server_comes_back_with_its_data_and_port(own_postgresql: PostgreSQLServer):
    address, first = own_postgresql.address, own_postgresql.pid
    with connect(address) as connection:
        connection.execute("CREATE TABLE kept (number int)")
        connection.execute("INSERT INTO kept VALUES (1)")
        own_postgresql.kill()
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    assert not own_postgresql.is_ready()
    own_postgresql.start()
    assert own_postgresql.pid != first
    with connect(address) as connection:
        assert connection.execute("SELECT number FROM kept").fetchall() == [(1,)]


def test_the_end_of_a_server_is_the_end_of_all_its_processes(own_postgresql: PostgreSQLServer):
    with connect(own_postgresql.address):
        children = keeper.children_of(own_postgresql.pid)
        assert len(children) > 1
        own_postgresql.kill()
    assert not any(map(runs, children))
    own_postgresql.start()


def test_it_stops_although_clients_are_connected(own_postgresql: PostgreSQLServer):
    with connect(own_postgresql.address):
        own_postgresql.stop()
    own_postgresql.start()


def test_a_paused_server_takes_requests_and_does_not_answer(own_postgresql: PostgreSQLServer):
    with connect(own_postgresql.address) as connection:
        waiting = connection.pgconn
        own_postgresql.pause()
        try:
            waiting.send_query(b"SELECT 1")
            assert not select.select([waiting.socket], [], [], 0.1)[0]
            own_postgresql.resume()
            assert waiting.get_result().get_value(0, 0) == b"1"
        finally:
            own_postgresql.resume()


def test_a_paused_server_can_be_killed(own_postgresql: PostgreSQLServer):
    own_postgresql.pause()
    own_postgresql.kill()
    own_postgresql.start()


def test_it_does_not_run_as_root(own_postgresql: PostgreSQLServer):
    assert Path(f"/proc/{own_postgresql.pid}").stat().st_uid != 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_when_the_owner_dies(postgresql, how):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    server, kept_by, folder = owner.stdout.readline().split()
    children = keeper.children_of(int(server))
    descriptor = os.pidfd_open(int(kept_by))
    try:
        owner.send_signal(how)
        owner.communicate()
        assert select.select([descriptor], [], [], 20)[0], "the keeper did not end"
    finally:
        os.close(descriptor)
    assert not any(map(runs, [int(server), *children]))
    assert not Path(folder).exists()
