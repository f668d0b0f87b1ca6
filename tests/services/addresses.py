"""Where the servers of a run are: as a value, and as an environment variable for other processes."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar


@dataclass(frozen=True)
class ServerAddress:
    """Host and port of a server, and an account that may do everything."""

    host: str
    port: int
    user: str
    password: str

    def django(self) -> dict[str, Any]:
        """Return the part of an entry of ``DATABASES`` or of a node that names the server."""
        return {
            "HOST": self.host,
            "PORT": self.port,
            "USER": self.user,
            "PASSWORD": self.password,
        }


AnyAddress = TypeVar("AnyAddress", bound=ServerAddress)


def read_environment(variable: str, kind: type[AnyAddress]) -> list[AnyAddress]:
    """Return the addresses in the environment ``variable``; empty if it is not set."""
    return [kind(**entry) for entry in json.loads(os.environ.get(variable, "[]"))]


def environment_of(variable: str, addresses: Sequence[ServerAddress]) -> dict[str, str]:
    """Return the environment ``variable`` that :func:`read_environment` reads."""
    return {variable: json.dumps([asdict(address) for address in addresses])}
