"""Types for the identity of a database session.

Before a session commits changes of cached rows, a write marker with its identity is stored in the
cache. So other processes can find out whether the session of a marker still exists.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple, Protocol


class SessionID(NamedTuple):
    """The identity of a session of a database server.

    All attributes are empty or 0 if the session has no identity, for example on SQLite.

    :param server: hash of the server's identity.
    :param account: hash of the account with which the session has logged in.
    :param connection: id of the session on the server.
    """

    server: str = ""
    account: str = ""
    connection: int = 0


class OpenSessions(NamedTuple):
    """The numbers of open sessions on a server: those of this process, and those of all clients."""

    #: Number of sessions that this process has open, in use or idle.
    process: int
    #: Number of sessions that this process has open and does not use now.
    idle: int
    #: Number of sessions that all clients together have open on the server.
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


def short_hash(text: str) -> str:
    """Return a short hash of ``text``, which identifies a server or an account.

    Each write marker in the cache contains such hashes. So they must be short, and must not reveal
    the names of servers and accounts.
    """
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
