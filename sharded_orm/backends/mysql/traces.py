"""Statements that read what an earlier statement left in its session.

``LAST_INSERT_ID()``, ``ROW_COUNT()``, ``SHOW WARNINGS`` and the like mean the session of
this alias, which may have served others since. They get the right session, or an error;
never what another alias left.
"""

from __future__ import annotations

from typing import Any

from sharded_orm.backends.mysql.connection import VirtualConnection
from sharded_orm.backends.mysql.session import FORGET_INSERT_ID, NodeSession
from sharded_orm.backends.mysql.statement_kind import reads_insert_id
from sharded_orm.exceptions import SessionStateRefused


def is_show(query: Any) -> bool:
    """``SHOW WARNINGS``: whatever runs before it empties the list that it shows."""
    text = query if isinstance(query, str) else bytes(query).decode("latin-1")
    return text.lstrip()[:4].upper() == "SHOW"


def lease(connection: VirtualConnection, query: Any) -> NodeSession:
    """The session that has the traces, leased.

    :raises SessionStateRefused: it has served another alias since.
    """
    pool = connection.pool
    reads_id = reads_insert_id(query)
    wanted = connection.insert_session if reads_id else connection.last_session
    if wanted is None:
        session: NodeSession = pool.lease()
        try:
            session.run(FORGET_INSERT_ID)
        except BaseException:
            pool.discard(session)
            raise
        session.inserter = None
        return session
    # Asked again once it is ours: another thread may have been in between.
    if _is_left_by(connection, wanted, reads_id) and pool.take(wanted):
        if _is_left_by(connection, wanted, reads_id):
            return wanted
        pool.release(wanted)
    raise _refused(connection)


def must_forget(connection: VirtualConnection, session: NodeSession, query: Any) -> bool:
    """Whether the held session must forget the id of somebody else's insert first.

    :raises SessionStateRefused: our own insert was on another session.
    """
    if not reads_insert_id(query) or session.inserter is connection:
        return False
    if connection.insert_session is not None:
        raise _refused(connection)
    return True


def _is_left_by(connection: VirtualConnection, session: NodeSession, reads_id: bool) -> bool:
    return (session.inserter if reads_id else session.last_user) is connection


def _refused(connection: VirtualConnection) -> SessionStateRefused:
    return SessionStateRefused(
        f"Alias {connection.alias!r}: the statement reads what an earlier statement left in its"
        " session (LAST_INSERT_ID(), ROW_COUNT(), SHOW WARNINGS, ...), but that session has"
        " served another alias since. Run both statements in one atomic() block, or use"
        " cursor.lastrowid and cursor.rowcount."
    )
