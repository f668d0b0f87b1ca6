"""Which database session a transaction has: what a write marker in the cache names."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class SessionID(NamedTuple):
    """A session of a database server.

    :param server: identity of the server, to compare by; empty if sessions have none.
    :param account: its account on the server, to compare by.
    :param connection: id of the session on that server, 0 for none.
    """

    server: str = ""
    account: str = ""
    connection: int = 0


class OpenSessions(NamedTuple):
    """The sessions of a server."""

    #: Of this process, in use and idle, and the idle ones among them.
    process: int
    idle: int
    #: Of all clients together.
    server: int


class SessionIdentity(Protocol):
    """The same, whoever made it."""

    @property
    def server(self) -> str: ...
    @property
    def account(self) -> str: ...
    @property
    def connection(self) -> int: ...
    def __hash__(self) -> int: ...
