"""Tell which session of which server made a write, and whether that session still exists.

A session's id means nothing without the identity of its server: after a promotion, another server
may have the same address. So each session asks its server once for its id and for the server's
identity.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from MySQLdb import MySQLError

from sharded_orm.backends.write_hooks.session_id import SessionID, SessionIdentity
from sharded_orm.exceptions import PoolTimeout

if TYPE_CHECKING:
    from sharded_orm.backends.mysql.node import NodePool
    from sharded_orm.backends.mysql.session import NodeSession

W = TypeVar("W", bound=SessionIdentity)

_VARIABLES = b"SHOW GLOBAL VARIABLES WHERE Variable_name IN ('server_uuid', 'server_uid')"
_MYSQL = b"@@server_uuid"
# Identity of a MariaDB server. server_uid alone is not enough, because it is made of the network
# address and the port: two containers may have the same server_uid.
_MARIADB = b"CONCAT_WS('/', %s@@hostname, @@port, @@server_id)"
# Whether the account itself has PROCESS, and so sees the sessions of all accounts. PROCESS from a role
# does not count here.
_PROCESS = (
    b"EXISTS (SELECT 1 FROM information_schema.user_privileges WHERE privilege_type = 'PROCESS'"
    b" AND grantee = CONCAT('''', SUBSTRING_INDEX(CURRENT_USER(), '@', 1), '''@''',"
    b" SUBSTRING_INDEX(CURRENT_USER(), '@', -1), ''''))"
)


def session_id(session: NodeSession, pool: NodePool) -> SessionID:
    """Return the identity of ``session``. The first call queries the server, even inside a transaction.

    The identity is empty if a proxy maps its sessions to those of the server: the ids that the proxy
    shows mean nothing to the server.

    :raises MySQLdb.Error: the server does not answer.
    """
    identity = session.identity
    if identity is None:
        server, account, number = session.fetch_one(
            b"SELECT %s, CURRENT_USER(), CONNECTION_ID()" % _expression(session, pool)
        )
        identity = SessionID(_short(server), _short(account), int(number))
        if identity.connection != session.raw.thread_id():
            identity = SessionID()
        session.identity = identity
    return identity


def judges(pool: NodePool, writer: SessionIdentity) -> bool:
    """Whether :func:`gone` can tell if the session ``writer`` still exists.

    True if the session is on the server of ``pool``, and either has the pool's account or that account
    sees the sessions of all accounts. Also True if the server does not answer now.
    """
    if not writer.server or not writer.connection:
        return False
    answer = pool.last_answer
    if answer is None or answer[0] != writer.server:
        # Ask again: another server may be behind the node's address by now.
        try:
            _, answer = _query_sessions(pool, ())
        except (MySQLError, PoolTimeout):
            return True
    server, account, sees_all = answer
    return writer.server == server and (sees_all or writer.account == account)


def gone(pool: NodePool, writers: Sequence[W]) -> set[W]:
    """Return those of ``writers`` whose sessions no longer exist.

    The set is empty if the server does not answer. A killed session still exists on MariaDB until it
    has rolled back or finished its COMMIT.
    """
    try:
        existing, _ = _query_sessions(pool, [writer.connection for writer in writers])
    except (MySQLError, PoolTimeout):
        return set()
    # Check the server's identity again: if the address has moved, the answer came from another server.
    return {w for w in writers if w.connection not in existing and judges(pool, w)}


def _query_sessions(pool: NodePool, ids: Sequence[int]) -> tuple[set[int], tuple[str, str, bool]]:
    session = pool.lease()
    try:
        id_list = b",".join(b"%d" % number for number in (0, *ids))
        server, account, sees_all, existing = session.fetch_one(
            b"SELECT %s, CURRENT_USER(), %s, (SELECT GROUP_CONCAT(id) FROM"
            b" information_schema.processlist WHERE id IN (%s))"
            % (_expression(session, pool), _PROCESS, id_list)
        )
    except BaseException:
        pool.discard(session)
        raise
    pool.release(session)
    answer = pool.last_answer = (_short(server), _short(account), bool(sees_all))
    return {int(number) for number in _text(existing).split(",") if number}, answer


def _expression(session: NodeSession, pool: NodePool) -> bytes:
    """Return an SQL expression for the server's identity, which differs by kind of server.

    The first call for a pool asks the server for its variables.
    """
    if pool.identity_sql is None:
        session.query(_VARIABLES)
        names = {_text(row[0]).lower() for row in session.store_result().fetch_row(0, 0)}
        if "server_uuid" in names:
            pool.identity_sql = _MYSQL
        else:
            pool.identity_sql = _MARIADB % (b"@@server_uid, " if "server_uid" in names else b"")
    return pool.identity_sql


def _short(value: object) -> str:
    """Return a short hash of ``value``.

    Each write marker in the cache contains it, so it must be short and must not reveal names.
    """
    return hashlib.blake2b(_text(value).encode(), digest_size=8).hexdigest()


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value or "")
