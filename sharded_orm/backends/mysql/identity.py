"""Find out which session of which server made a write, and whether that session still exists.

The id of a session is not enough to find it again: after a promotion (a replica takes over),
another server may have the same address, and use the same ids. So each session queries both its id
and the identity of its server, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from MySQLdb import MySQLError

from sharded_orm.backends.write_hooks.session_id import SessionID, SessionIdentity, short_hash
from sharded_orm.exceptions import PoolTimeout
from sharded_orm.mysql_flavor import FLAVORS, MySQLFlavor

if TYPE_CHECKING:
    from sharded_orm.backends.mysql.node import NodePool
    from sharded_orm.backends.mysql.session import NodeSession

W = TypeVar("W", bound=SessionIdentity)

_VARIABLES = "SHOW GLOBAL VARIABLES WHERE Variable_name IN ({})".format(
    ", ".join(f"'{name}'" for flavor in FLAVORS for name in flavor.identity)
).encode()
# SQL condition: the account has the privilege PROCESS, with which it sees the sessions of all
# accounts. A PROCESS that the account has only through a role does not count.
_PROCESS = (
    b"EXISTS (SELECT 1 FROM information_schema.user_privileges WHERE privilege_type = 'PROCESS'"
    b" AND grantee = CONCAT('''', SUBSTRING_INDEX(CURRENT_USER(), '@', 1), '''@''',"
    b" SUBSTRING_INDEX(CURRENT_USER(), '@', -1), ''''))"
)


def session_id(session: NodeSession, pool: NodePool) -> SessionID:
    """Return the identity of ``session``: its server, its account and its id. The first call for a
    session queries the server, even inside a transaction.

    The identity is empty if clients reach the server through a proxy: the session ids that clients
    see are then the proxy's, and mean nothing to the server.

    :raises MySQLdb.Error: the server does not answer.
    """
    identity = session.identity
    if identity is None:
        server, account, number = session.fetch_one(
            b"SELECT %s, CURRENT_USER(), CONNECTION_ID()" % _expression(session, pool)
        )
        identity = SessionID(short_hash(_text(server)), short_hash(_text(account)), int(number))
        if identity.connection != session.raw.thread_id():
            identity = SessionID()
        session.identity = identity
    return identity


def judges(pool: NodePool, writer: SessionIdentity) -> bool:
    """Whether :func:`gone` can find out if the session ``writer`` still exists.

    True if the session is on the server of ``pool``, and the pool's account can see it. An account
    sees its own sessions and, with the privilege PROCESS, those of all accounts. False if
    ``writer`` is empty. If the server does not answer, nothing can be found out now, but perhaps
    later, so the result is True.
    """
    if not writer.server or not writer.connection:
        return False
    answer = pool.last_answer
    if answer is None or answer[0] != writer.server:
        # The server of the pool has not answered yet, or its last answer came from another server
        # than that of ``writer``. Since then, a promotion may have led the node's address to
        # another server. So query which server it is now.
        try:
            _, answer = _query_sessions(pool, ())
        except (MySQLError, PoolTimeout):
            return True
    server, account, sees_all = answer
    return writer.server == server and (sees_all or writer.account == account)


def gone(pool: NodePool, writers: Sequence[W]) -> set[W]:
    """Return those of the sessions ``writers`` that no longer exist on the server of ``pool``.

    A session for which :func:`judges` returns False is never returned. If the server does not
    answer, the set is empty. On MariaDB, a killed session still exists until it has rolled back or
    finished its COMMIT.
    """
    try:
        existing, _ = _query_sessions(pool, [writer.connection for writer in writers])
    except (MySQLError, PoolTimeout):
        return set()
    # After a promotion, another server answers at the node's address. It does not have the sessions
    # of the old server, so they would look as if they had ended. So judges() compares the servers.
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
    answer = pool.last_answer = (
        short_hash(_text(server)),
        short_hash(_text(account)),
        bool(sees_all),
    )
    return {int(number) for number in _text(existing).split(",") if number}, answer


def _expression(session: NodeSession, pool: NodePool) -> bytes:
    """Return an SQL expression for the server's identity. MySQL and MariaDB have different
    variables for it.

    The first call for a pool queries which of these variables the server has.
    """
    if pool.identity_sql is None:
        session.query(_VARIABLES)
        names = {_text(row[0]).lower() for row in session.store_result().fetch_row(0, 0)}
        identity = MySQLFlavor.of_variables(names).identity
        variables = ", ".join(f"@@{name}" for name in identity if name in names)
        # A proxy may hide the variables. The identity is then empty: CONCAT_WS() of NULL.
        pool.identity_sql = f"CONCAT_WS('/', {variables or 'NULL'})".encode()
    return pool.identity_sql


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value or "")
