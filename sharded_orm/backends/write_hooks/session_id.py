"""The identity of a database session.

Before a transaction commits changes of cached rows, it stores a marker in the cache, which contains
the identity of its session. If the process dies, other processes can find out that the session is
gone, and that the marker is out of date.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple, Protocol


class SessionID(NamedTuple):
    """The identity of a session of a database server.

    If the session has no identity, for example on SQLite, the texts are empty and the number is 0.

    :param server: hash of the server's identity.
    :param account: hash of the account with which the session has logged in.
    :param connection: id of the session on the server.
    """

    server: str = ""
    account: str = ""
    connection: int = 0


class OpenSessions(NamedTuple):
    """How many sessions are open on a server: those of this process, and those of all clients."""

    #: How many sessions this process has open: those in use and the idle ones.
    process: int
    #: How many sessions this process has open without using them now.
    idle: int
    #: How many sessions all clients together have open on the server.
    server: int


class SessionIdentity(Protocol):
    """Any object with the attributes of a :class:`SessionID`. For example, other parts of the
    library have their own classes with these attributes.
    """

    @property
    def server(self) -> str: ...
    @property
    def account(self) -> str: ...
    @property
    def connection(self) -> int: ...
    def __hash__(self) -> int: ...


def short_hash(text: str) -> str:
    """Return a short hash of ``text``, which identifies a server or an account.

    Each marker of a write in the cache contains two such hashes. They are short to save space, and
    hashed so that the cache does not reveal the names of servers and accounts.
    """
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
