"""How sessions are opened: options of the driver, service files, passwords in a file, and TLS."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psycopg
import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import OperationalError, connections

from sharded_orm.backends.postgresql.base import DatabaseWrapper
from tests.integration.postgresql.conftest import Node
from tests.services import find_program
from tests.services.postgresql import DATABASE, PostgreSQLServer, unprivileged_account


@contextmanager
def other_alias(node: Node, **settings: Any) -> Iterator[DatabaseWrapper]:
    """An alias of the schema ``t_1`` whose settings are those of the node, and these."""
    connections.settings["other"] = {**node.settings, "SCHEMA": "t_1", **settings}
    wrapper = connections["other"]
    assert isinstance(wrapper, DatabaseWrapper)
    try:
        yield wrapper
    finally:
        if wrapper._node_pool is not None:
            wrapper._node_pool.dispose()
        wrapper.close()
        del connections["other"], connections.settings["other"]


def ask(wrapper: DatabaseWrapper, sql: str) -> Any:
    with wrapper.cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchall()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("pool", True),
        ("server_side_binding", True),
        ("cursor_factory", psycopg.Cursor),
        ("prepare_threshold", 5),
        ("prepare_threshold", 0),  # at the first execution
    ],
)
def test_options_that_contradict_shared_sessions(node: Node, option: str, value: object) -> None:
    problem = rf"Alias 'other': OPTIONS\['{option}'\]"
    with (
        other_alias(node, OPTIONS={option: value}) as wrapper,
        pytest.raises(ImproperlyConfigured, match=problem),
    ):
        wrapper.ensure_connection()


def test_a_stream_of_a_server_that_is_down_fails_with_its_error_only(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignored: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    with other_alias(node, HOST="127.0.0.1", PORT=1) as wrapper:
        with pytest.raises(OperationalError), wrapper.node_cursor(stream=True):
            pass
        gc.collect()
    assert ignored == []


def test_a_service_and_a_password_file(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings name neither server nor database nor account."""
    address = node.address
    services, passwords = tmp_path / "services", tmp_path / "passwords"
    services.write_text(
        f"[shards]\nhost={address.host}\nport={address.port}\nuser={address.user}\ndbname={DATABASE}\n"
    )
    passwords.write_text(f"*:*:*:*:{address.password}\n")
    passwords.chmod(0o600)  # libpq ignores others
    monkeypatch.setenv("PGSERVICEFILE", str(services))
    options = {"service": "shards", "passfile": str(passwords)}
    names = dict.fromkeys(("NAME", "HOST", "PORT", "USER", "PASSWORD"), "")
    with other_alias(node, OPTIONS=options, **names) as wrapper:
        assert ask(wrapper, "SELECT DISTINCT shard, current_database() FROM item") == [
            (1, DATABASE)
        ]


@pytest.fixture
def certificate() -> Iterator[tuple[Path, Path]]:
    """The key and the certificate of a server at 127.0.0.1, in a folder of the server's account."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        key, certificate = folder / "server.key", folder / "server.crt"
        program = find_program("OpenSSL", "openssl")
        command = f"{program} req -x509 -nodes -newkey rsa:2048 -days 2 -subj /CN=server"
        where = [
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-keyout",
            str(key),
            "-out",
            str(certificate),
        ]
        subprocess.run([*command.split(), *where], check=True, capture_output=True)
        key.chmod(0o600)
        for path in (folder, key, certificate):
            os.chown(path, *(unprivileged_account() or (-1, -1)))
        yield key, certificate


@pytest.mark.long
def test_a_session_with_tls(node: Node, certificate: tuple[Path, Path], tmp_path: Path) -> None:
    key, trusted = certificate
    other = tmp_path / "other.crt"
    other.write_text("")
    options = {"ssl": "on", "ssl_key_file": str(key), "ssl_cert_file": str(trusted)}

    def secured(root: Path) -> dict[str, Any]:
        return {"OPTIONS": {"sslmode": "verify-full", "sslrootcert": str(root)}}

    with PostgreSQLServer(**options) as server:
        with psycopg.connect(**server.address.psycopg(DATABASE), autocommit=True) as admin:
            admin.execute("CREATE SCHEMA t_1")
        with other_alias(node, **server.address.node(**secured(trusted))) as wrapper:
            sql = "SELECT ssl, current_schema() FROM pg_stat_ssl WHERE pid = pg_backend_pid()"
            assert ask(wrapper, sql) == [(True, "t_1")]
        with (
            other_alias(node, **server.address.node(**secured(other))) as wrapper,
            pytest.raises(OperationalError, match="certificate"),
        ):
            wrapper.ensure_connection()
