"""Identities of database sessions. A write marker in the cache names the session of its writer."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class SessionID(NamedTuple):
    """A session of a database server.

    :param server: hash of the server's identity; empty if sessions have none.
    :param account: hash of the session's account on the server.
    :param connection: id of the session on that server, 0 for none.
    """

    server: str = ""
    account: str = ""
    connection: int = 0


class OpenSessions(NamedTuple):
    """Numbers of sessions of a server."""

    #: Sessions of this process, in use or idle, and the idle ones among them.
    process: int
    idle: int
    #: Sessions of all clients.
    server: int


class SessionIdentity(Protocol):
    """A :class:`SessionID`, or an equivalent of another layer."""

    @property
    def server(self) -> str: ...
    @property
    def account(self) -> str: ...
    @property
    def connection(self) -> int: ...
    def __hash__(self) -> int: ...
