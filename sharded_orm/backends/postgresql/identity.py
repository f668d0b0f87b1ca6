"""Find out which session of which server made a write, and whether that session still exists.

A process id alone does not tell the session, because a server uses process ids again. So a
session's identity contains the start time of its process, too. It also contains the identity of the
server. After a promotion, another server may have the same address and the same system identifier,
but it has a new timeline. So the timeline is part of the server's identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import psycopg

from sharded_orm.backends.write_hooks.session_id import SessionID, SessionIdentity, short_hash
from sharded_orm.exceptions import PoolTimeout

if TYPE_CHECKING:
    from sharded_orm.backends.postgresql.node import PostgreSQLPool
    from sharded_orm.backends.postgresql.session import PostgreSQLNodeSession

W = TypeVar("W", bound=SessionIdentity)

_SERVER = (
    "(SELECT s.system_identifier || '/' || c.timeline_id"
    " FROM pg_catalog.pg_control_system() s, pg_catalog.pg_control_checkpoint() c)"
)
# SQL for one number that identifies a session: the start time in milliseconds, followed by the
# lowest 20 bits of the process id. It stays below 2**63 for centuries.
_NUMBER = "((extract(epoch FROM backend_start) * 1000)::bigint << 20) + (pid & 1048575)"
_OWN = (
    f"(SELECT {_NUMBER} FROM pg_catalog.pg_stat_activity WHERE pid = pg_catalog.pg_backend_pid())"
)
# SQL condition: whether the account may see when sessions of other accounts began. If the session
# has taken a role (SET ROLE), the privileges of the role count instead. Such a session may not even
# see its own start.
_SEES_ALL = "pg_catalog.pg_has_role(current_user, 'pg_read_all_stats', 'USAGE')"


def session_id(session: PostgreSQLNodeSession, pool: PostgreSQLPool) -> SessionID:
    """Return the identity of ``session``: its server, its account and its number. The first call
    for a session queries the server, even inside a transaction.

    The identity is empty behind a connection pooler, which may give each transaction another
    session. It is also empty if the account may not see its own session in ``pg_stat_activity``.

    :raises psycopg.Error: the server does not answer.
    """
    identity = session.identity
    if identity is None:
        if pool.has_pooler:
            identity = SessionID()
        else:
            ((server, account, number),) = session.run(
                f"SELECT {_SERVER}, session_user::text, {_OWN}".encode()
            )
            identity = (
                SessionID(short_hash(server), short_hash(account), int(number))
                if number is not None
                else SessionID()
            )
        session.identity = identity
    return identity


def judges(pool: PostgreSQLPool, writer: SessionIdentity) -> bool:
    """Whether :func:`gone` can find out if the session ``writer`` still exists.

    It can if the session is on the server of ``pool``, and the pool's account may see the session.
    If the server does not answer now, return True, because it may answer later. If ``writer`` is
    empty, return False.
    """
    if not writer.server or not writer.connection:
        return False
    answer = pool.last_answer
    if answer is None or answer[0] != writer.server:
        # The pool's last answer, if any, came from another server than that of the session. The
        # node's address may lead to another server by now, so query again which server answers.
        try:
            _, answer = _query_sessions(pool)
        except (psycopg.Error, PoolTimeout):
            return True
    server, account, sees_all = answer
    return writer.server == server and (sees_all or writer.account == account)


def gone(pool: PostgreSQLPool, writers: Sequence[W]) -> set[W]:
    """Return those of the sessions ``writers`` that no longer exist on the server of ``pool``.

    A session for which :func:`judges` returns False is never returned. If the server does not
    answer, the set is empty. A killed session still exists until its process has ended.
    """
    try:
        existing, _ = _query_sessions(pool)
    except (psycopg.Error, PoolTimeout):
        return set()
    return {w for w in writers if w.connection not in existing and judges(pool, w)}


def _query_sessions(pool: PostgreSQLPool) -> tuple[set[int], tuple[str, str, bool]]:
    session = pool.lease()
    try:
        ((server, account, sees_all, own, existing),) = session.run(
            f"SELECT {_SERVER}, session_user::text, {_SEES_ALL}, {_OWN},"
            f" (SELECT array_agg({_NUMBER}) FROM pg_catalog.pg_stat_activity"
            " WHERE backend_start IS NOT NULL)".encode()
        )
    except BaseException:
        pool.discard(session)
        raise
    pool.release(session)
    # Record whose sessions this pool's account can see. Usually, these are at least its own. But if
    # it cannot even see when its own session began, it can see nobody's, so record "".
    visible = short_hash(account) if own is not None else ""
    answer = pool.last_answer = (short_hash(server), visible, bool(sees_all))
    return {int(number) for number in existing or ()}, answer
