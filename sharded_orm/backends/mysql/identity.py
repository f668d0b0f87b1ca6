"""Who is who on a server: identities of servers and sessions, and which sessions still exist.

A session's id means nothing without its server's identity: behind one address there may be
another server after a promotion. So each session asks its own server, once.
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
# MariaDB makes server_uid of the network address and the port, which containers may share.
_MARIADB = b"CONCAT_WS('/', %s@@hostname, @@port, @@server_id)"
# An account with PROCESS sees the sessions of all accounts. One that has it by a role counts
# as one that has not.
_PROCESS = (
    b"EXISTS (SELECT 1 FROM information_schema.user_privileges WHERE privilege_type = 'PROCESS'"
    b" AND grantee = CONCAT('''', SUBSTRING_INDEX(CURRENT_USER(), '@', 1), '''@''',"
    b" SUBSTRING_INDEX(CURRENT_USER(), '@', -1), ''''))"
)


def session_id(session: NodeSession, pool: NodePool) -> SessionID:
    """Who ``session`` is. Asks the server at the first time, which may be in a transaction.

    Nobody in particular behind a proxy that has sessions of its own: their ids mean nothing
    to the server.

    :raises MySQLdb.Error: the server does not answer.
    """
    found = session.identity
    if found is None:
        server, account, number = session.fetch_one(
            b"SELECT %s, CURRENT_USER(), CONNECTION_ID()" % _expression(session, pool)
        )
        found = SessionID(_short(server), _short(account), int(number))
        if found.connection != session.raw.thread_id():
            found = SessionID()
        session.identity = found
    return found


def judges(pool: NodePool, writer: SessionIdentity) -> bool:
    """Whether :func:`gone` can tell about ``writer``: it is of the same server, and of the same
    account or ours may see all. True while the server does not answer."""
    if not writer.server or not writer.connection:
        return False
    asked = pool.asked_as
    if asked is None or asked[0] != writer.server:
        # Behind the address there may be another one than the last time.
        try:
            _, asked = _ask(pool, ())
        except (MySQLError, PoolTimeout):
            return True
    server, account, sees_all = asked
    return writer.server == server and (sees_all or writer.account == account)


def gone(pool: NodePool, writers: Sequence[W]) -> set[W]:
    """Those whose sessions do not exist any more; none if the server does not answer.

    MariaDB lists a session until it has rolled back, or has finished the COMMIT that it was
    killed in.
    """
    try:
        there, _ = _ask(pool, [writer.connection for writer in writers])
    except (MySQLError, PoolTimeout):
        return set()
    # Once more: it is another server's answer if the address moved in between.
    return {w for w in writers if w.connection not in there and judges(pool, w)}


def _ask(pool: NodePool, ids: Sequence[int]) -> tuple[set[int], tuple[str, str, bool]]:
    session = pool.lease()
    try:
        listed = b",".join(b"%d" % number for number in (0, *ids))
        server, account, sees_all, there = session.fetch_one(
            b"SELECT %s, CURRENT_USER(), %s, (SELECT GROUP_CONCAT(id) FROM"
            b" information_schema.processlist WHERE id IN (%s))"
            % (_expression(session, pool), _PROCESS, listed)
        )
    except BaseException:
        pool.discard(session)
        raise
    pool.release(session)
    asked = pool.asked_as = (_short(server), _short(account), bool(sees_all))
    return {int(number) for number in _text(there).split(",") if number}, asked


def _expression(session: NodeSession, pool: NodePool) -> bytes:
    """What the servers of this kind call themselves, in SQL."""
    if pool.identity_sql is None:
        session.query(_VARIABLES)
        names = {_text(row[0]).lower() for row in session.store_result().fetch_row(0, 0)}
        if "server_uuid" in names:
            pool.identity_sql = _MYSQL
        else:
            pool.identity_sql = _MARIADB % (b"@@server_uid, " if "server_uid" in names else b"")
    return pool.identity_sql


def _short(value: object) -> str:
    """Something to compare by: every announced write carries it, and it names nobody."""
    return hashlib.blake2b(_text(value).encode(), digest_size=8).hexdigest()


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value or "")
