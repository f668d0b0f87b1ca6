"""Private MariaDB servers: free ports, temporary folders, gone when their owner is gone.

As a pytest fixture: ``mariadb``, ``mariadb_nodes`` and ``own_mariadb`` of ``tests/conftest.py``.
From a shell::

    python -m tests.services.mariadb [--servers N] -- COMMAND…

runs COMMAND with the addresses in ``SHARDED_ORM_TEST_MYSQL`` (a JSON list of
``{"host", "port", "user", "password"}``), where the fixtures and
``tests.settings.mysql`` find them.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.services import ServiceMissing, find_program, keeper, required

ENVIRONMENT = "SHARDED_ORM_TEST_MYSQL"
START_TIMEOUT = 60.0  # seconds

_OPTIONS = {
    # Durability is of no use to a folder that is thrown away.
    "innodb-flush-log-at-trx-commit": "0",
    "innodb-doublewrite": "0",
    "innodb-log-file-size": "64M",
    "innodb-buffer-pool-size": "128M",
    "skip-log-bin": None,
    # Comparisons with one stock connection per shard need one for each of many shards.
    "max-connections": "5000",
    # Thousands of logical shards are thousands of tables.
    "table-open-cache": "20000",
    "table-definition-cache": "20000",
    "open-files-limit": "65535",
    "max-allowed-packet": "64M",
    "skip-name-resolve": None,
    "character-set-server": "utf8mb4",
    "collation-server": "utf8mb4_general_ci",
}


@dataclass(frozen=True)
class Address:
    """How to reach a server, with an account that may do everything."""

    host: str
    port: int
    user: str
    password: str

    def django(self) -> dict[str, Any]:
        """The part of an entry of ``DATABASES`` or of a node that names the server."""
        return {
            "HOST": self.host,
            "PORT": self.port,
            "USER": self.user,
            "PASSWORD": self.password,
        }

    def mysqldb(self) -> dict[str, Any]:
        """Keyword arguments of ``MySQLdb.connect``."""
        return {
            "host": self.host,
            "port": self.port,
            "user": self.user,
            "password": self.password,
        }


class MariaDBServer:
    """One server of our own. It may be killed and started again by a test.

    The port and the data stay the same over :meth:`kill` and :meth:`start`. Use as a
    context manager, or call :meth:`close`. Whatever happens to this process, the server
    ends with it (see ``keeper``).
    """

    def __init__(self, **options: str | None) -> None:
        """Make the data folder and start; returns at once, see :meth:`wait_ready`.

        :param options: more options of ``mariadbd``, e.g. ``wait_timeout="2"``.
        :raises ServiceMissing: MariaDB is not installed.
        """
        program = find_program("MariaDB", "mariadbd", "mysqld")
        install = find_program("MariaDB", "mariadb-install-db", "mysql_install_db")
        self.folder = Path(tempfile.mkdtemp(prefix="mariadb-"))
        self.address = Address("127.0.0.1", _free_port(), "tester", secrets.token_hex(8))
        # A server that starts deletes the temporary tables in its folder for them, of
        # whatever server they are; one that loses its own may crash.
        self._tmp = self.folder / "tmp"
        self.pid: int | None = None
        with contextlib.ExitStack() as on_error:
            on_error.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self._install(install)
            self._keeper = subprocess.Popen(
                [
                    sys.executable,
                    keeper.__file__,
                    str(self.folder),
                    *self._command(program, options),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,  # a Ctrl-C reaches us, not the servers
            )
            on_error.pop_all()
        self.start(wait=False)

    def _install(self, program: str) -> None:
        self._tmp.mkdir()
        # --no-defaults: the configuration of the machine must not matter.
        made = subprocess.run(
            [
                program,
                "--no-defaults",
                "--auth-root-authentication-method=normal",
                "--skip-test-db",
                f"--datadir={self.folder / 'data'}",
                *_as_root(),
            ],
            env={**os.environ, "TMPDIR": str(self._tmp)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if made.returncode:
            raise RuntimeError(f"mariadb-install-db failed ({made.returncode}):\n{made.stdout}")
        account = f"'{self.address.user}'@'%'"
        (self.folder / "init.sql").write_text(
            f"CREATE USER IF NOT EXISTS {account} IDENTIFIED BY '{self.address.password}';\n"
            f"GRANT ALL PRIVILEGES ON *.* TO {account} WITH GRANT OPTION;\n"
        )

    def _command(self, program: str, options: dict[str, str | None]) -> list[str]:
        own = {
            "datadir": str(self.folder / "data"),
            "socket": str(self.folder / "socket"),
            "pid-file": str(self.folder / "pid"),
            "init-file": str(self.folder / "init.sql"),
            "tmpdir": str(self._tmp),
            "bind-address": self.address.host,
            "port": str(self.address.port),
        }
        more = {name.replace("_", "-"): value for name, value in options.items()}
        return [
            program,
            "--no-defaults",
            *(
                f"--{name}" if value is None else f"--{name}={value}"
                for name, value in {**_OPTIONS, **own, **more}.items()
            ),
            *_as_root(),
        ]

    def _order(self, what: str) -> str:
        if self._keeper.stdin is None or self._keeper.stdin.closed:
            raise RuntimeError("this server was closed")
        assert self._keeper.stdout is not None
        self._keeper.stdin.write(what + "\n")
        self._keeper.stdin.flush()
        return self._keeper.stdout.readline().strip()

    def start(self, wait: bool = True) -> None:
        """Start it (again) on the same port with the same data."""
        if self.pid is not None:
            raise RuntimeError("this server runs already")
        answer = self._order("start")
        if not answer.startswith("pid "):
            raise RuntimeError(f"the keeper of the server ended: {answer!r}")
        self.pid = int(answer.removeprefix("pid "))
        if wait:
            self.wait_ready()

    def kill(self) -> None:
        """SIGKILL it and wait for its end: a crash, as clients see it."""
        self._order("kill")
        self.pid = None

    def stop(self) -> None:
        """Shut it down in order."""
        self._order("stop")
        self.pid = None

    def wait_ready(self) -> None:
        """Return when the server greets clients; RuntimeError with its log when it does not."""
        assert self.pid is not None
        end = time.monotonic() + START_TIMEOUT
        while not _greets(self.address):
            if time.monotonic() > end or not _runs(self.pid):
                log = (self.folder / "output.log").read_text(errors="replace")
                self.close()
                raise RuntimeError(f"MariaDB did not start on port {self.address.port}:\n{log}")
            time.sleep(0.05)  # between two attempts to connect

    def close(self) -> None:
        """End it and remove its folder. May be called twice."""
        if self._keeper.stdin is not None and not self._keeper.stdin.closed:
            self._keeper.stdin.close()
        self._keeper.wait()
        if self._keeper.stdout is not None:
            self._keeper.stdout.close()
        self.pid = None

    def __enter__(self) -> MariaDBServer:
        self.wait_ready()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@contextlib.contextmanager
def servers(count: int, **options: str | None) -> Iterator[list[MariaDBServer]]:
    """``count`` servers that start at the same time and are ready.

    :raises ServiceMissing: MariaDB is not installed.
    """
    with contextlib.ExitStack() as stack:
        running = []
        for _ in range(count):
            running.append(server := MariaDBServer(**options))
            stack.callback(server.close)
        for server in running:
            server.wait_ready()
        yield running


def addresses_from_environment() -> list[Address]:
    """The servers that run already for these tests; empty when there are none."""
    return [Address(**entry) for entry in json.loads(os.environ.get(ENVIRONMENT, "[]"))]


def to_environment(addresses: list[Address]) -> dict[str, str]:
    """The environment variable that :func:`addresses_from_environment` reads."""
    return {ENVIRONMENT: json.dumps([asdict(address) for address in addresses])}


def _free_port() -> int:
    # Below the range from which the kernel takes ports for outgoing connections: one of
    # those could take the port before the server does, or while it is down.
    while True:
        port = 20000 + secrets.randbelow(12000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _greets(address: Address) -> bool:
    """Whether the server answers a connection with its handshake (protocol 10)."""
    try:
        with socket.create_connection((address.host, address.port), timeout=5) as connection:
            return connection.recv(5)[4:5] == b"\x0a"
    except OSError:
        return False


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _as_root() -> list[str]:
    # mariadbd refuses to run as root unless told so; elsewhere the option is not allowed.
    return ["--user=root"] if os.geteuid() == 0 else []


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.services.mariadb",
        description=f"Run a command with private MariaDB servers, named in ${ENVIRONMENT}.",
    )
    parser.add_argument("--servers", type=int, default=2, metavar="N", help="how many (default 2)")
    parser.add_argument("command", nargs="+", help="after --")
    options = parser.parse_args()

    def interrupt(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, interrupt)
    try:
        with servers(options.servers) as running:
            addresses = [server.address for server in running]
            for server in running:
                print(f"MariaDB: port {server.address.port}, process {server.pid}", file=sys.stderr)
            return run_to_end(options.command, {**os.environ, **to_environment(addresses)})
    except ServiceMissing as exc:
        if required():
            print(exc, file=sys.stderr)
            return 1
        print(f"{exc} Going on without it.", file=sys.stderr)
        return run_to_end(options.command, dict(os.environ))


def run_to_end(command: list[str], environment: dict[str, str]) -> int:
    """Run ``command``. It is interrupted with us, ends before us, and does not outlive us."""
    child = subprocess.Popen(
        command,
        env=environment,
        preexec_fn=functools.partial(keeper.die_with_parent, signal.SIGTERM),
    )
    try:
        return child.wait()
    except KeyboardInterrupt:
        # A terminal has sent it to the child as well, which now cleans up; kill has not.
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(5)
        child.send_signal(signal.SIGINT)
        return child.wait()
    finally:
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


if __name__ == "__main__":
    sys.exit(main())
