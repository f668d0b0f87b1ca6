"""Private ZooKeeper servers: free ports, a small heap, gone when their owner is gone.

As a pytest fixture: ``own_zookeeper`` of ``tests/integration/topology``. Keyword arguments are
options of ``zoo.cfg`` with ``_`` for ``.``: ``ZooKeeperServer(maxSessionTimeout="2000")``.
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from tests.services import ServiceMissing, find_program
from tests.services.server import HOST, PrivateServer, running

# Debian's package. Its manifest names all jars that it needs, except those for TLS.
JAR = Path("/usr/share/java/zookeeper.jar")


class ZooKeeperServer(PrivateServer):
    """A private standalone ZooKeeper. Its data survives :meth:`kill`."""

    service = "ZooKeeper"

    def _find_programs(self) -> None:
        if not JAR.exists():
            raise ServiceMissing(
                f"ZooKeeper is not installed: there is no {JAR}. ./scripts/test installs what is"
                " missing on Debian."
            )
        self._java = find_program(self.service, "java")

    @property
    def hosts(self) -> str:
        return f"{HOST}:{self.port}"

    def _install(self) -> None:
        (self.folder / "data").mkdir()

    def _command(self, options: dict[str, str | None]) -> list[str]:
        settings = {
            "dataDir": self.folder / "data",
            "clientPort": self.port,
            "clientPortAddress": HOST,
            # Sessions may be as short as two ticks.
            "tickTime": 100,
            "maxSessionTimeout": 60_000,
            "maxClientCnxns": 0,
            "admin.enableServer": "false",
            "4lw.commands.whitelist": "srvr",
            **{name.replace("_", "."): value for name, value in options.items()},
        }
        lines = [f"{name}={value}\n" for name, value in settings.items()]
        (self.folder / "zoo.cfg").write_text("".join(lines))
        (self.folder / "logback.xml").write_text("<configuration/>")
        return [
            self._java,
            "-Xmx64m",
            "-XX:+UseSerialGC",
            "-XX:TieredStopAtLevel=1",
            "-Dzookeeper.forceSync=no",
            "-cp",
            f"{JAR}:{JAR.parent / 'netty-codec.jar'}",
            "org.apache.zookeeper.server.ZooKeeperServerMain",
            str(self.folder / "zoo.cfg"),
        ]

    def is_ready(self) -> bool:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((HOST, self.port), timeout=5) as connection,
        ):
            connection.sendall(b"srvr")
            answer = b""
            while b"Mode:" not in answer:
                if not (part := connection.recv(4096)):
                    return False
                answer += part
            return True
        return False


def servers(
    count: int, **options: str | None
) -> contextlib.AbstractContextManager[list[ZooKeeperServer]]:
    """Start ``count`` servers at the same time and yield them when they are ready; no ensemble.

    :raises ServiceMissing: ZooKeeper is not installed.
    """
    return running(ZooKeeperServer, count, **options)
