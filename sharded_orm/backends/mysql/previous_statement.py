"""Find the session for a statement that reads what an earlier statement has left in a session.

Such statements contain ``LAST_INSERT_ID()``, ``ROW_COUNT()`` or ``SHOW WARNINGS``. Each must run on
the session of the same alias's earlier statement. If another alias has used that session since, the
statement is refused.
"""

from __future__ import annotations

from typing import Any

from sharded_orm.backends.mysql.connection import VirtualConnection
from sharded_orm.backends.mysql.session import FORGET_INSERT_ID, NodeSession
from sharded_orm.backends.mysql.statement_kind import reads_insert_id
from sharded_orm.exceptions import SessionStateRefused


def is_show(query: Any) -> bool:
    """Whether ``query`` is a SHOW statement.

    ``SHOW WARNINGS`` shows the warnings of the previous statement, and another statement would
    clear them. So not even ``USE`` may be sent before ``query``.
    """
    text = query if isinstance(query, str) else bytes(query).decode("latin-1")
    return text.lstrip()[:4].upper() == "SHOW"


def lease(connection: VirtualConnection, query: Any) -> NodeSession:
    """Lease the session in which an earlier statement has left what ``query`` reads.

    If ``query`` reads the id of an insert, this is the session of the last insert of
    ``connection``. Otherwise it is that of its last statement. Without such a statement, lease any
    session, and make it forget the id of its last insert.

    :raises SessionStateRefused: another alias has used the session since, or the session is dead.
    """
    pool = connection.pool
    reads_id = reads_insert_id(query)
    earlier = connection.insert_session if reads_id else connection.last_session
    if earlier is None:
        session: NodeSession = pool.lease()
        try:
            session.run(FORGET_INSERT_ID)
        except BaseException:
            pool.discard(session)
            raise
        session.inserter = None
        return session
    # Check twice that this connection was the last user of the session: before and after taking the
    # session. Another thread may use it in between.
    if _was_used_by(connection, earlier, reads_id) and pool.take(earlier):
        if _was_used_by(connection, earlier, reads_id):
            return earlier
        pool.release(earlier)
    raise _refused(connection)


def must_forget(connection: VirtualConnection, session: NodeSession, query: Any) -> bool:
    """Whether ``session`` has to forget the id of another alias's insert before ``query`` runs.

    :param session: the session that ``connection`` holds.
    :raises SessionStateRefused: ``session`` does not have the id of the last insert of
        ``connection``: it ran on another session, or another alias has inserted a row here since.
    """
    if not reads_insert_id(query) or session.inserter is connection:
        return False
    if connection.insert_session is not None:
        raise _refused(connection)
    return True


def _was_used_by(connection: VirtualConnection, session: NodeSession, reads_id: bool) -> bool:
    return (session.inserter if reads_id else session.last_user) is connection


def _refused(connection: VirtualConnection) -> SessionStateRefused:
    return SessionStateRefused(
        f"Alias {connection.alias!r}: the statement reads what an earlier statement left in its"
        " session (LAST_INSERT_ID(), ROW_COUNT(), SHOW WARNINGS, ...), but that session has"
        " served another alias since. Run both statements in one atomic() block, or use"
        " cursor.lastrowid and cursor.rowcount."
    )
