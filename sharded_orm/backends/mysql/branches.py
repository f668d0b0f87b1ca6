"""The XA branches of a MySQL or MariaDB server: list the prepared ones, and commit or roll them
back.

An XA branch is the part of a two-phase transaction on one shard. The statements of this module
write its name in hexadecimal digits. As long as the session that prepared a branch is connected,
only that session can commit it or roll it back. To any other session, the server answers as if the
branch did not exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from MySQLdb import IntegrityError, MySQLError, OperationalError

from sharded_orm.backends.mysql.lock_waits import LOCK_WAIT
from sharded_orm.backends.mysql.session import NodeSession
from sharded_orm.backends.two_phase.branch import TABLE, BranchName, Completion, Fate

if TYPE_CHECKING:
    from sharded_orm.backends.mysql.node import NodePool

#: The format id in the names of this library's XA branches. Other programs use other format ids.
_FORMAT: Final = 0x53484F52
#: XAER_NOTA: the XA branch does not exist, or the session that prepared it is still connected.
_UNKNOWN_BRANCH: Final = 1397
#: XA_RBROLLBACK: the branch has changed no row, so the server rolled it back when the session that
#: prepared it ended. MariaDB goes on listing the branch as prepared until somebody sends ``XA
#: COMMIT`` or ``XA ROLLBACK``. That statement fails with this error, and removes the branch from
#: the list.
_CHANGED_NOTHING: Final = 1402
_DEADLOCK: Final = 1213
_DUPLICATE: Final = 1062


def name_of(branch: BranchName) -> bytes:
    """Return the name of ``branch`` in the form that XA statements need: the transaction and the
    schema in hexadecimal digits, and the format id.
    """
    parts = (branch.transaction.encode().hex(), branch.schema.encode().hex())
    return "X'{}',X'{}',{}".format(*parts, _FORMAT).encode()


def prepared(pool: NodePool) -> list[BranchName]:
    """Return the names of this library's prepared XA branches (parts of two-phase commits) on the
    server of ``pool``. One query.

    On MySQL, the account needs the privilege XA_RECOVER_ADMIN.
    """
    session = pool.lease()
    try:
        rows = _rows(session, b"XA RECOVER")
    except BaseException:
        pool.discard(session)
        raise
    pool.release(session)
    return branches_in(rows)


def branches_in(rows: Iterable[Sequence[Any]]) -> list[BranchName]:
    """Return the names of the XA branches in ``rows``. Branches of other programs are left out.

    :param rows: rows of ``XA RECOVER``, which lists all prepared branches of the server.
    """
    branches = []
    for number, length, _, data in rows:
        name = data if isinstance(data, bytes) else str(data).encode()
        if int(number) == _FORMAT:
            parts = (name[: int(length)], name[int(length) :])
            branches.append(BranchName(*(part.decode(errors="replace") for part in parts)))
    return branches


def end(pool: NodePool, branch: BranchName, *, commit: bool) -> Completion:
    """Commit or roll back a prepared XA branch, one shard's part of a two-phase commit.

    Return DONE if this call has ended the branch, and GONE if the server does not list the branch
    any more. Return HELD if the session that prepared the branch is still connected, so that no
    other session can end it.
    """
    session = pool.lease()
    try:
        session.run(b"XA %s %s" % (b"COMMIT" if commit else b"ROLLBACK", name_of(branch)))
    except BaseException as exc:
        if not isinstance(exc, MySQLError) or exc.args[0] not in (
            _UNKNOWN_BRANCH,
            _CHANGED_NOTHING,
        ):
            pool.discard(session)
            raise
        pool.release(session)
        return Completion.HELD if branch in prepared(pool) else Completion.GONE
    pool.release(session)
    return Completion.DONE


def fate(pool: NodePool, schema: str, transaction: str, seconds: int) -> Fate:
    """Return whether a two-phase transaction was committed, was rolled back, or is still open.

    The transaction inserts a row with its name when it commits. So this function tries to insert
    the same row. The INSERT fails if the transaction was committed, and waits for a lock if it is
    still open. See ``TwoPhaseMixin.fate_of``.

    :param schema: the schema of the shard whose commit decides.
    :param transaction: the name of the transaction.
    :param seconds: how long to wait for the lock before the transaction counts as open.
    """
    session = pool.lease_new()
    try:
        session.run(b"SET innodb_lock_wait_timeout=%d" % seconds, b"BEGIN")
        table = f"`{schema.replace('`', '``')}`.{TABLE}"
        try:
            session.run(
                session.bind(
                    f"INSERT INTO {table} (name, decided_at) VALUES (%s, 0)", (transaction,)
                )
            )
        except IntegrityError as exc:
            if exc.args[:1] != (_DUPLICATE,):
                raise
            return Fate.COMMITTED
        except OperationalError as exc:
            if exc.args[:1] in ((LOCK_WAIT,), (_DEADLOCK,)):
                return Fate.OPEN
            raise
        session.run(b"ROLLBACK")
        return Fate.ABORTED
    finally:
        # Close the session rather than return it to the pool: the server then rolls back its
        # transaction, and the changed innodb_lock_wait_timeout affects no later user.
        pool.discard(session)


def _rows(session: NodeSession, statement: bytes) -> list[tuple[Any, ...]]:
    session.stored = False
    session.query(statement)
    rows = list(session.store_result().fetch_row(0, 0))
    session.stored = True
    return rows
