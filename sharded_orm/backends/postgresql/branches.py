"""The prepared transactions of a database (parts of two-phase commits): list them, and commit or
roll them back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import psycopg

from sharded_orm.backends.postgresql.lock_waits import is_lock_wait
from sharded_orm.backends.postgresql.sql_quotes import literal, quoted
from sharded_orm.backends.two_phase.branch import TABLE, BranchName, Completion, Fate

if TYPE_CHECKING:
    from sharded_orm.backends.postgresql.node import PostgreSQLPool
    from sharded_orm.backends.postgresql.session import PostgreSQLNodeSession

#: The names of this library's prepared transactions begin with this text. Those of other
#: programs do not.
_PREFIX: Final = "sharded_orm:"
#: A statement that limits each wait for a lock in the open transaction to 50 seconds, which is
#: MariaDB's default. Does nothing if the server or the session has a limit already.
WAIT_LIMIT: Final = (
    b"SELECT pg_catalog.set_config('lock_timeout', '50s', true)"
    b" WHERE pg_catalog.current_setting('lock_timeout') = '0'"
)


def name_of(branch: BranchName) -> str:
    """Return the name under which the server stores the prepared transaction of ``branch``."""
    return f"{_PREFIX}{branch.transaction}:{branch.schema}"


def obstacle(pool: PostgreSQLPool) -> str:
    """Return the reason why the server cannot prepare transactions, and what an operator can do
    about it. Return "" if the server can prepare them.

    The first call for a pool queries the server; later calls cost nothing.
    """
    if pool.max_prepared is None:
        session = pool.lease()
        try:
            rows = session.run(
                b"SELECT pg_catalog.current_setting('max_prepared_transactions')::int"
            )
        except BaseException:
            pool.discard(session)
            raise
        pool.release(session)
        pool.max_prepared = rows[0][0]
    if pool.max_prepared:
        return ""
    return (
        f"max_prepared_transactions is 0 on {pool.name!r}. Set it to max_connections in the"
        " configuration of the server, and start the server again"
    )


def prepare_statement(name: str) -> bytes:
    return f"PREPARE TRANSACTION {literal(name)}".encode()


def end_on(session: PostgreSQLNodeSession, name: str, *, commit: bool) -> bool:
    """Commit or roll back the prepared transaction ``name``. Return False if the server has none of
    this name.
    """
    how = "COMMIT" if commit else "ROLLBACK"
    try:
        session.run(f"{how} PREPARED {literal(name)}".encode())
    except psycopg.errors.UndefinedObject:
        return False
    return True


def prepared(pool: PostgreSQLPool) -> list[BranchName]:
    """Return the prepared transactions of this library in the database of ``pool``. One query."""
    session = pool.lease()
    try:
        rows = session.run(
            "SELECT gid FROM pg_catalog.pg_prepared_xacts WHERE database ="
            f" pg_catalog.current_database() AND gid LIKE {literal(_PREFIX + '%')}".encode()
        )
    except BaseException:
        pool.discard(session)
        raise
    pool.release(session)
    return branches_named(gid for (gid,) in rows)


def branches_named(names: Iterable[str]) -> list[BranchName]:
    """Return the branches (parts of two-phase commits) that have one of ``names``. Names of other
    programs' prepared transactions are left out.
    """
    ours = (name.removeprefix(_PREFIX) for name in names if name.startswith(_PREFIX))
    return [BranchName(*name.split(":", 1)) for name in ours if ":" in name]


def end(pool: PostgreSQLPool, branch: BranchName, *, commit: bool) -> Completion:
    """Commit or roll back a prepared transaction, one shard's part of a two-phase commit.

    Return DONE if this call has ended it, and GONE if the server has no such prepared transaction.
    Return HELD if another session is ending it at this moment.
    """
    session = pool.lease()
    try:
        is_done = end_on(session, name_of(branch), commit=commit)
    except psycopg.errors.ObjectNotInPrerequisiteState:
        pool.release(session)
        return Completion.HELD
    except BaseException:
        pool.discard(session)
        raise
    pool.release(session)
    return Completion.DONE if is_done else Completion.GONE


def fate(pool: PostgreSQLPool, schema: str, transaction: str, seconds: float) -> Fate:
    """Return whether a two-phase transaction was committed, was rolled back, or is still open. See
    ``TwoPhaseMixin.fate_of``.
    """
    session = pool.lease()
    try:
        session.run(
            f"BEGIN; SET LOCAL lock_timeout = {max(1, int(seconds * 1000))};"
            f" INSERT INTO {quoted(schema)}.{TABLE} (name, decided_at)"
            f" VALUES ({literal(transaction)}, 0)".encode()
        )
    except psycopg.errors.UniqueViolation:
        return Fate.COMMITTED
    except psycopg.Error as exc:
        if is_lock_wait(exc):
            return Fate.OPEN
        raise
    finally:
        _roll_back(pool, session)
    return Fate.ABORTED


def _roll_back(pool: PostgreSQLPool, session: PostgreSQLNodeSession) -> None:
    try:
        session.run(b"ROLLBACK")
    except psycopg.Error:
        pool.discard(session)
    else:
        pool.release(session)
