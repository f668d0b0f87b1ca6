"""The private servers of the tests: they start, crash, come back and are never left behind."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.services import ServiceMissing, find_program
from tests.services.mariadb import Address, MariaDBServer, addresses_from_environment
from tests.services.server import HOST, runs

OWNER = """
import sys
from tests.services.mariadb import servers
with servers(1) as (server,):
    print(server.pid, server._keeper.pid, server.folder, flush=True)
    sys.stdin.read()
"""


def greets(address: Address) -> bool:
    with socket.create_connection((address.host, address.port)) as connection:
        return connection.recv(5)[4:5] == b"\x0a"  # the handshake of protocol 10


def test_shared_servers_are_up(mariadb_nodes):
    assert len({address.port for address in mariadb_nodes}) == 2
    assert all(map(greets, mariadb_nodes))


def test_a_killed_server_comes_back_with_its_data_and_port(own_mariadb: MariaDBServer):
    address, first = own_mariadb.address, own_mariadb.pid
    own_mariadb.kill()
    assert not own_mariadb.is_ready()
    own_mariadb.start()
    assert own_mariadb.is_ready()
    assert own_mariadb.address == address
    assert own_mariadb.pid != first


def test_a_paused_server_takes_connections_and_does_not_answer(own_mariadb: MariaDBServer):
    own_mariadb.pause()
    try:
        with socket.create_connection((HOST, own_mariadb.port)) as waiting:
            assert not select.select([waiting], [], [], 0.1)[0]
            own_mariadb.resume()
            assert waiting.recv(5)[4:5] == b"\x0a"
    finally:
        own_mariadb.resume()


def test_a_paused_server_can_be_killed(own_mariadb: MariaDBServer):
    own_mariadb.pause()
    own_mariadb.kill()
    own_mariadb.start()


def test_temporary_tables_are_in_its_own_folder(own_mariadb: MariaDBServer):
    # Any server that starts deletes the temporary tables in its folder.
    driver = pytest.importorskip("MySQLdb")
    own_mariadb.wait_ready()
    with contextlib.closing(driver.connect(**own_mariadb.address.mysqldb())) as connection:
        cursor = connection.cursor()
        cursor.execute("SELECT @@tmpdir")
        ((folder,),) = cursor.fetchall()
    assert own_mariadb.folder in Path(folder).parents


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_when_the_owner_dies(mariadb, how):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    server, keeper, folder = owner.stdout.readline().split()
    # A process's descriptor becomes readable when the process ends: nothing to poll.
    descriptor = os.pidfd_open(int(keeper))
    try:
        owner.send_signal(how)
        owner.communicate()
        assert select.select([descriptor], [], [], 20)[0], "the keeper did not end"
    finally:
        os.close(descriptor)
    assert not runs(int(server))
    assert not Path(folder).exists()


def test_a_missing_program_is_named():
    with pytest.raises(ServiceMissing, match="Nonesuch is not installed: none of"):
        find_program("Nonesuch", "nonesuchd")


def test_addresses_travel_through_the_environment(monkeypatch):
    monkeypatch.setenv(
        "SHARDED_ORM_TEST_MYSQL", '[{"host": "h", "port": 1, "user": "u", "password": "p"}]'
    )
    (address,) = addresses_from_environment()
    assert address.django() == {"HOST": "h", "PORT": 1, "USER": "u", "PASSWORD": "p"}
