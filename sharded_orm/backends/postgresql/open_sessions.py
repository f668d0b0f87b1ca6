"""Find out which statements that began before a given moment may still change rows of a database.

A move needs this. At that moment, it notes which sessions exist. Later it waits until each of these
sessions has finished the statement and the transaction that it had then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from django.db import OperationalError

Run = Callable[..., list[tuple[Any, ...]]]

_MICROSECONDS: Final = "(extract(epoch FROM {0}) * 1000000)::bigint"
# The query for the sessions that can send statements to this database. Processes of the server
# itself, and those of replication, are left out.
_SESSIONS: Final = (
    "SELECT pid, {}, {}, {}, state, usename, backend_type FROM pg_catalog.pg_stat_activity"
    " WHERE datname = pg_catalog.current_database() AND pid <> pg_catalog.pg_backend_pid()"
    " AND (backend_type IS NULL OR backend_type = 'client backend')"
).format(*map(_MICROSECONDS.format, ("backend_start", "query_start", "xact_start")))
_PREPARED: Final = (
    f"SELECT gid, {_MICROSECONDS.format('prepared')} FROM pg_catalog.pg_prepared_xacts"
    " WHERE database = pg_catalog.current_database()"
)


def marker(run: Run) -> dict[str, Any]:
    """Return a marker of this moment: which sessions and prepared transactions exist now. Later,
    :func:`left` returns how many of these may still be at work. The marker consists of JSON values.

    :raises django.db.OperationalError: the account may not see the sessions of other accounts.
    """
    return {
        "sessions": [
            [pid, started, statement, transaction]
            for pid, started, statement, transaction, _ in _sessions(run)
        ],
        "prepared": [list(row) for row in run(_PREPARED)],
    }


def left(run: Run, markers: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return one number for each marker: how many of its sessions and prepared transactions may
    still change rows by a statement that began before the marker was made.

    A session is not counted if it has ended. It is also not counted if it has finished another
    statement since the marker was made, and if the transaction that it had then has ended.
    Statements and transactions are recognized by their start times. The start times are only
    compared for equality, so it does not matter whether the server's clock is right.

    :param markers: results of :func:`marker`.
    :raises django.db.OperationalError: the account may not see the sessions of other accounts.
    """
    now = {(pid, started): rest for pid, started, *rest in _sessions(run)}
    prepared = {tuple(row) for row in run(_PREPARED)}
    return [
        sum(
            _is_left(statement, transaction, now.get((pid, started)))
            for pid, started, statement, transaction in then["sessions"]
        )
        + len(prepared.intersection(map(tuple, then["prepared"])))
        for then in markers
    ]


def _is_left(statement: int | None, transaction: int | None, now: list[Any] | None) -> bool:
    if now is None:
        return False  # The session has ended.
    last_statement, last_transaction, state = now
    if transaction is not None and last_transaction == transaction:
        return True
    # A session that is running a statement now still counts: the client may have sent this
    # statement before the marker was made, although the server began it later.
    has_ended_one = str(state).startswith("idle") and last_statement != statement
    return not has_ended_one


def _sessions(run: Run) -> Iterator[tuple[int, int, int | None, int | None, str | None]]:
    for pid, started, statement, transaction, state, user, kind in run(_SESSIONS):
        if kind is None:
            ((account,),) = run("SELECT current_user")
            raise OperationalError(
                f"The account {account!r} may not see what the sessions of {user!r} do: grant it"
                " pg_read_all_stats."
            )
        yield pid, started, statement, transaction, state
