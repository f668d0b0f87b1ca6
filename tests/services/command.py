"""The command line of a kind of servers: ``python -m tests.services.NAME [--servers N] -- COMMAND…``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Protocol

from tests.services import ServiceMissing, required
from tests.services.addresses import ServerAddress, environment_of
from tests.services.server import run_to_end


class AddressedServer(Protocol):
    """A server that runs and has an address."""

    pid: int | None

    @property
    def address(self) -> ServerAddress: ...


def run_with_servers(
    service: str,
    variable: str,
    servers: Callable[[int], AbstractContextManager[Iterable[AddressedServer]]],
) -> int:
    """Run the command of the command line with private servers, and return its exit code.

    Without the program of the service the command runs without servers; in CI it does not run.

    :param service: the name of the service, for people.
    :param variable: the environment variable in which the command finds the addresses.
    :param servers: starts this many servers.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m tests.services.{service.lower()}",
        description=f"Run a command with private {service} servers, named in ${variable}.",
    )
    parser.add_argument("--servers", type=int, default=2, metavar="N", help="how many (default 2)")
    parser.add_argument("command", nargs="+", help="after --")
    options = parser.parse_args()

    def interrupt(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, interrupt)
    try:
        with servers(options.servers) as started:
            addresses = []
            for server in started:
                addresses.append(server.address)
                port = server.address.port
                print(f"{service}: port {port}, process {server.pid}", file=sys.stderr)
            environment = {**os.environ, **environment_of(variable, addresses)}
            return run_to_end(options.command, environment)
    except ServiceMissing as exc:
        if required():
            print(exc, file=sys.stderr)
            return 1
        print(f"{exc} Going on without it.", file=sys.stderr)
        return run_to_end(options.command, dict(os.environ))
