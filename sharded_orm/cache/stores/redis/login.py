"""Logs in on a new connection to Redis, and reads the incarnation of the data on the server.

The incarnation is a random word before all names of entries. It is replaced if the server was
restarted or replaced, because the server may have old data then.
"""

from __future__ import annotations

import re
import secrets
import time
from typing import Any

from sharded_orm.cache.stores.redis.protocol import LINE_END, Refusal, pack, parse_replies
from sharded_orm.cache.stores.redis.scripts import REPLACE_OWNER
from sharded_orm.cache.stores.sockets import Connection, ProtocolError

#: The entry with this name says which Redis server wrote the data. Its value is the ``run_id`` of
#: that server, a colon, and the incarnation (the random word before all names of entries). If a
#: server finds another ``run_id`` than its own, it was restarted or replaced, and may have old
#: data.
OWNER = b"sharded-orm-incarnation"
_RUN_ID = re.compile(rb"^run_id:(\w+)\r?$", re.MULTILINE)
#: The number of characters of an incarnation, the random word before all names of entries.
LENGTH = 12


def log_in(connection: Any, deadline: float) -> bytes:
    """Log in on a new connection. Return the value of the entry :data:`OWNER`.

    This entry has the ``run_id`` of the server that wrote the data, and the incarnation (the
    random word before all names of entries). If the entry is missing, or another server wrote
    the data, first replace the value by this server's ``run_id`` and a new incarnation.

    :param connection: a connection object of redis-py.
    :param deadline: a time on the monotonic clock.
    :raises ProtocolError: the server cannot be used.
    """
    commands: list[tuple[bytes, ...]] = []
    provider = connection.credential_provider
    if provider is not None:
        credentials = provider.get_credentials()
    elif connection.password:
        credentials = (connection.username or "default", connection.password)
        if not connection.username:
            # Without a user name, send only the password, because Redis before 6.0 does not
            # accept a user name.
            credentials = credentials[1:]
    else:
        credentials = ()
    if credentials:
        commands.append((b"AUTH", *(part.encode() for part in credentials)))
    if connection.db:
        commands.append((b"SELECT", b"%d" % int(connection.db)))
    commands += ((b"INFO", b"server"), (b"INFO", b"replication"), (b"GET", OWNER))
    *_, server, replication, owner = _ask(connection, commands, deadline)
    if (run_id := _RUN_ID.search(server)) is None:
        raise ProtocolError("INFO tells no run_id")
    if b"role:slave" in replication.splitlines():
        raise ProtocolError("it is a replica")
    own = re.compile(rb"%b:[0-9a-f]{%d}" % (run_id[1], LENGTH))
    if own.fullmatch(owner or b""):
        return bytes(owner)
    new = b"%b:%b" % (run_id[1], secrets.token_hex(LENGTH // 2).encode())
    claim = (b"EVAL", REPLACE_OWNER.source, b"1", OWNER, owner or b"", new)
    (owner,) = _ask(connection, [claim], deadline)
    if not own.fullmatch(owner):
        raise ProtocolError("several servers say that the data are theirs")
    return bytes(owner)


def _ask(connection: Any, commands: list[tuple[bytes, ...]], deadline: float) -> list[Any]:
    """Send commands on a connection that :func:`log_in` prepares, and return their replies.

    :raises ProtocolError: a command was refused, or a reply has the wrong type. A reply must be
        bytes; the reply to GET may also be None.
    """
    left = max(deadline - time.monotonic(), 0.001)
    replies = Connection(connection._sock, left).ask(
        pack(commands), LINE_END, lambda raw: parse_replies(raw, len(commands)), deadline
    )
    for command, reply in zip(commands, replies, strict=True):
        if isinstance(reply, Refusal):
            raise ProtocolError(f"{command[0].decode()} was refused: {reply.code}")
        if not isinstance(reply, bytes) and (reply is not None or command[0] != b"GET"):
            raise ProtocolError(f"unexpected reply to {command[0].decode()}")
    return replies
