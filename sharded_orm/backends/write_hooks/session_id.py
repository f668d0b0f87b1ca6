"""Types for the identity of a database session.

A write marker in the cache says which session is about to commit a change of an entry.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class SessionID(NamedTuple):
    """The identity of a session of a database server. It is empty for a backend without such ids.

    :param server: hash of the server's identity; empty if the session has no identity.
    :param account: hash of the account with which the session has logged in.
    :param connection: id of the session on the server; 0 if the session has no identity.
    """

    server: str = ""
    account: str = ""
    connection: int = 0


class OpenSessions(NamedTuple):
    """How many sessions a database server has."""

    #: Number of sessions of this process, in use or idle.
    process: int
    #: Number of idle sessions of this process.
    idle: int
    #: Number of sessions of all clients.
    server: int


class SessionIdentity(Protocol):
    """A :class:`SessionID`, or an object of another layer that has the same attributes."""

    @property
    def server(self) -> str: ...
    @property
    def account(self) -> str: ...
    @property
    def connection(self) -> int: ...
    def __hash__(self) -> int: ...
