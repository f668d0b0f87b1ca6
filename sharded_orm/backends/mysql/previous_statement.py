"""Find the session for a statement that reads what the alias's earlier statement has left in its
session: ``LAST_INSERT_ID()``, ``ROW_COUNT()`` or ``SHOW WARNINGS``.

Such a statement gives the right answer only on the session of the earlier statement. If another
alias has used that session since, the statement is refused.
"""

from __future__ import annotations

from typing import Any

from sharded_orm.backends.mysql.connection import VirtualConnection
from sharded_orm.backends.mysql.session import FORGET_INSERT_ID, NodeSession
from sharded_orm.backends.mysql.statement_kind import reads_insert_id
from sharded_orm.exceptions import SessionStateRefused


def is_show(query: Any) -> bool:
    """Whether ``query`` is a SHOW statement.

    ``SHOW WARNINGS`` shows the warnings of the session's last statement. If ``USE`` were sent
    before it, the warnings would be lost. So nothing may be sent before a SHOW.
    """
    text = query if isinstance(query, str) else bytes(query).decode("latin-1")
    return text.lstrip()[:4].upper() == "SHOW"


def lease(connection: VirtualConnection, query: Any) -> NodeSession:
    """Lease the session in which an earlier statement of ``connection`` has left what ``query``
    reads.

    If ``query`` reads the id of an insert (``LAST_INSERT_ID()``), lease the session of the last
    insert of ``connection``; otherwise the session of its last statement. If there was none, lease
    any session of the pool, and clear the id of the last insert there, because another alias has
    made that insert.

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
    # Check that no other alias has used the session since the earlier statement. Check it once more
    # after the session was taken from the pool, because another thread may have used it in between.
    if _was_used_by(connection, earlier, reads_id) and pool.take(earlier):
        if _was_used_by(connection, earlier, reads_id):
            return earlier
        pool.release(earlier)
    raise _refused(connection)


def must_forget(connection: VirtualConnection, session: NodeSession, query: Any) -> bool:
    """Whether the id of another alias's insert must be cleared in ``session`` before ``query``
    runs, so that ``LAST_INSERT_ID()`` does not return that id.

    :param session: the session that ``connection`` holds.
    :raises SessionStateRefused: ``connection`` has inserted a row, but ``session`` does not have
        the id of this row. Either the row was inserted on another session, or another alias has
        inserted a row on ``session`` since.
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
