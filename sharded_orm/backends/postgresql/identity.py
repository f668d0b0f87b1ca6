"""Find out which session of which server made a write, and whether that session still exists.

A session is identified by its process id and the start time of its process (a server reuses process
ids), together with the identity of its server. After a promotion, another server may have the same
address and the same system identifier, but it has a new timeline. So the timeline is a part of the
server's identity.
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
# SQL for the number of a session: the milliseconds of its start time, and the lowest 20 bits of its
# process id. The number stays below 2**63 for centuries.
_NUMBER = "((extract(epoch FROM backend_start) * 1000)::bigint << 20) + (pid & 1048575)"
_OWN = (
    f"(SELECT {_NUMBER} FROM pg_catalog.pg_stat_activity WHERE pid = pg_catalog.pg_backend_pid())"
)
# SQL condition: whether the account may see when sessions of other accounts began. If the session
# has taken a role (SET ROLE), the privileges of the role count. So the session may not even see
# itself.
_SEES_ALL = "pg_catalog.pg_has_role(current_user, 'pg_read_all_stats', 'USAGE')"


def session_id(session: PostgreSQLNodeSession, pool: PostgreSQLPool) -> SessionID:
    """Return the identity of ``session``. The first call queries the server, even inside a transaction.

    The identity is empty if clients reach the server through a connection pooler, because a pooler
    may give each transaction another session. The identity is also empty if the account may not see
    its own session in ``pg_stat_activity``.

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

    True if the session is on the server of ``pool``, and the pool's account can see the session. Also
    True if the server does not answer now. False if ``writer`` is empty.
    """
    if not writer.server or not writer.connection:
        return False
    answer = pool.last_answer
    if answer is None or answer[0] != writer.server:
        # The last answer came from another server than the writer's. The node's address may lead to
        # the writer's server now, so query the identity of the server again.
        try:
            _, answer = _query_sessions(pool)
        except (psycopg.Error, PoolTimeout):
            return True
    server, account, sees_all = answer
    return writer.server == server and (sees_all or writer.account == account)


def gone(pool: PostgreSQLPool, writers: Sequence[W]) -> set[W]:
    """Return those of the sessions ``writers`` that no longer exist on the server of ``pool``.

    A session is left out if :func:`judges` returns False for it. If the server does not answer, the
    set is empty. A killed session still exists until its process has ended.
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
    # Record the account whose sessions this session can see. A session that cannot see even itself
    # sees none, so record no account ("").
    visible = short_hash(account) if own is not None else ""
    answer = pool.last_answer = (short_hash(server), visible, bool(sees_all))
    return {int(number) for number in existing or ()}, answer
