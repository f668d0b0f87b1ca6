"""A server that is down: every call of Django on a connection object raises Django's own errors."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import OperationalError, connections

from sharded_orm import runtime
from tests.integration.mysql import walk
from tests.patience import PATIENCE
from tests.services.mariadb import Address, MariaDBServer, to_environment
from tests.unit.backends.group.conftest import using_nodes

# An ordinary alias, a shard, and the alias of a group.
ALIASES = ("default", "photos_00000", "photos")


@contextmanager
def walking(how: str, address: Address) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", walk.__name__, how, *ALIASES],
        env=os.environ
        | {"DJANGO_SETTINGS_MODULE": "tests.settings.mysql"}
        | to_environment([address, address]),
        text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def outcome(process: subprocess.Popen[str]) -> dict[str, str]:
    said, errors = process.communicate("go\n", timeout=PATIENCE)
    assert process.returncode == 0, errors
    problems: dict[str, str] = json.loads(said.splitlines()[-1])
    return problems


def test_a_process_that_has_never_reached_it() -> None:
    with socket.socket() as nobody:
        # The port is taken, and nobody listens.
        nobody.bind(("127.0.0.1", 0))
        with walking("fresh", Address("127.0.0.1", nobody.getsockname()[1], "u", "p")) as process:
            assert outcome(process) == {}


@pytest.mark.parametrize("how", ["idle", "held"])
def test_a_process_that_was_connected(how: str, own_mariadb: MariaDBServer) -> None:
    if own_mariadb.pid is None:
        own_mariadb.start()
    with walking(how, own_mariadb.address) as process:
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert ready == "ready\n", process.communicate()[1]
        own_mariadb.kill()
        assert outcome(process) == {}


def test_the_error_names_the_shard_and_its_node(
    django_db_blocker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = Address("127.0.0.1", nobody.getsockname()[1], "u", "p")
        nodes = {
            name: {"ENGINE": "sharded_orm.backends.mysql", **address.django()}
            for name in runtime.config().topology.nodes
        }
        with django_db_blocker.unblock(), using_nodes(nodes, monkeypatch) as topology:
            shard = topology.resolve("photos_00003")
            assert shard is not None
            with pytest.raises(OperationalError, match="connect") as caught:
                connections[shard.alias].cursor().execute("SELECT 1")
    assert caught.value.__notes__ == [f"This was on shard 'photos_00003', node {shard.node!r}."]
    assert caught.value.args[0] == 2002
