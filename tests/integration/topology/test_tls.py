"""ZooKeeper over TLS: the option CLIENT is passed through."""

from __future__ import annotations

import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import service_missing
from tests.integration.topology.conftest import site_with_zookeeper
from tests.integration.topology.site import document
from tests.patience import PATIENCE
from tests.services import ServiceMissing, find_program
from tests.services.server import HOST, free_port
from tests.services.zookeeper import ZooKeeperServer


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A self-signed certificate for ``localhost`` and its key."""
    try:
        program = find_program("OpenSSL", "openssl")
    except ServiceMissing as exc:
        service_missing(exc)
    made = tmp_path / "cert.pem"
    command = [
        program, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
        "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost",
        "-keyout", str(tmp_path / "key.pem"), "-out", str(made),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    (tmp_path / "both.pem").write_text((tmp_path / "key.pem").read_text() + made.read_text())
    return made


def _shake_hands(port: int, certificate: Path) -> None:
    """Wait for a first handshake: the server loads its classes, longer than kazoo waits."""
    context = ssl.create_default_context(cafile=str(certificate))
    with (
        socket.create_connection((HOST, port), timeout=PATIENCE) as plain,
        context.wrap_socket(plain, server_hostname="localhost"),
    ):
        pass


def test_a_server_is_believed_by_its_certificate(
    tmp_path: Path, sqlite_nodes: dict[str, dict[str, Any]], certificate: Path
) -> None:
    port = free_port()
    try:
        server = ZooKeeperServer(
            secureClientPort=str(port),
            secureClientPortAddress=HOST,
            serverCnxnFactory="org.apache.zookeeper.server.NettyServerCnxnFactory",
            ssl_keyStore_location=str(tmp_path / "both.pem"),
            ssl_trustStore_location=str(certificate),
            ssl_clientAuth="none",
        )
    except ServiceMissing as exc:
        service_missing(exc)
    with server:
        _shake_hands(port, certificate)
        known: dict[str, Any] = {"use_ssl": True, "ca": str(certificate), "check_hostname": True}
        site = site_with_zookeeper(tmp_path, sqlite_nodes, f"localhost:{port}", CLIENT=known)
        site.push(document(1))
        with site.process() as process:
            site.push(document(1, "two"))
            process.wait_version(2)
        site.last_good.unlink()
        site.source["OPTIONS"].update(CLIENT={"use_ssl": True}, WAIT=1)
        site.save()
        # Without the helper: kazoo leaves the socket of a failed handshake to the garbage
        # collector.
        command = site.start("topology", "show")
        _, err = command.communicate(timeout=PATIENCE)
        assert command.returncode == 1
        assert "does not answer within 1 s" in err
