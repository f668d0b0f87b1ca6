"""Physical sessions (server connections) of PostgreSQL. A node's pool keeps and leases them."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from inspect import Parameter, signature
from typing import Any

import psycopg
from psycopg.pq import Conninfo, ConnStatus, TransactionStatus

from sharded_orm.backends.write_hooks.session_id import SessionID
from sharded_orm.forks import send_nowhere

_POLL_FOR = getattr(select, "POLLIN", 0) | getattr(select, "POLLPRI", 0)
_BAD = ConnStatus.BAD
_ACTIVE, _IDLE, _INTRANS, _INERROR = (
    TransactionStatus.ACTIVE,
    TransactionStatus.IDLE,
    TransactionStatus.INTRANS,
    TransactionStatus.INERROR,
)


class PostgreSQLNodeSession:
    """A physical session with a node's server. While it is idle in the pool, no transaction is
    open, and the search path is the server's default.

    The driver's connection is always in autocommit: our virtual connection sends BEGIN and COMMIT
    itself.
    """

    __slots__ = (
        "__weakref__", "close_at", "identity", "permit", "pgconn", "poll", "raw", "retired", "schemas",
        "suspect", "tables", "user",
    )  # fmt: skip

    def __init__(self, raw: psycopg.Connection[Any]) -> None:
        self.raw = raw
        self.pgconn = raw.pgconn
        self.close_at: float | None = None
        self.suspect = False
        self.retired = False
        self.user = 0
        self.permit: object | None = None
        #: Which session of which server this is; None until the server was queried for it.
        self.identity: SessionID | None = None
        #: The schemas that the session has used. The pool counts them, because the server's process
        #: keeps memory for their tables until the session ends.
        self.schemas: set[str] = set()
        #: The tables that queries over many schemas have read in this session, as pairs (schema,
        #: table). The pool counts these tables as well as the schemas.
        self.tables: set[tuple[str, str]] = set()
        self.poll = _poller(raw.fileno())

    @property
    def is_idle(self) -> bool:
        """Whether the session is alive and no transaction is open in it."""
        return self.pgconn.transaction_status == _IDLE

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open on the server, failed or not."""
        return self.pgconn.transaction_status in (_INTRANS, _INERROR)

    @property
    def has_failed(self) -> bool:
        """Whether a statement of the open transaction has failed, so that only a rollback is
        possible.
        """
        return self.pgconn.transaction_status == _INERROR

    @property
    def is_usable(self) -> bool:
        """Whether no statement is running, and the session is not known to be dead."""
        return self.pgconn.transaction_status in (_IDLE, _INTRANS, _INERROR)

    @property
    def is_busy(self) -> bool:
        """Whether a statement has not ended yet. This is so if a COPY or a stream of rows was not
        read to its end.
        """
        return self.pgconn.transaction_status == _ACTIVE

    @property
    def is_dead(self) -> bool:
        return self.pgconn.status == _BAD

    def run(self, statements: bytes) -> list[tuple[Any, ...]]:
        """Run statements in one packet. Return the rows of the last statement; an empty list if it has
        none.
        """
        cursor = self.raw.execute(statements)
        while cursor.nextset():
            pass
        return cursor.fetchall() if cursor.description else []

    def end_transaction(self, how: str) -> None:
        """Commit or roll back the open transaction.

        :param how: "commit" or "rollback".
        :raises psycopg.OperationalError: the session is lost. The transaction may or may not have
            ended.
        """
        try:
            getattr(self.raw, how)()
        except psycopg.InternalError as exc:
            if self.is_idle:
                raise
            # If a session is lost behind a pooler, both the server and the pooler report its end.
            # The driver expects only one answer, and raises InternalError. Raise the usual error
            # for a lost session instead.
            raise psycopg.OperationalError(f"the connection was lost at {how}: {exc}") from exc

    def ping(self) -> bool:
        try:
            self.run(b"")
        except psycopg.Error:
            return False
        return True

    def close(self) -> None:
        with suppress(psycopg.Error):
            self.raw.close()

    def abandon(self) -> None:
        """Make this session unusable in a forked child, without sending anything to the server.

        The session belongs to the parent process, which goes on using it.
        """
        if not self.is_dead:
            send_nowhere(self.pgconn.socket)


def connect(params: Mapping[str, Any]) -> PostgreSQLNodeSession:
    """Open a session in autocommit.

    :param params: arguments of ``psycopg.connect``.
    """
    # prepare_threshold=None keeps the driver from preparing statements. A statement has the same
    # text in all schemas. If it was prepared for the tables of one schema, it would fail in another
    # schema whose table has other columns.
    raw: Any = psycopg.Connection.connect(**params, autocommit=True, prepare_threshold=None)
    # Use no real lock: a session has only one user at a time. The driver's stream() holds the lock
    # from row to row. With a real one, a second statement of the same thread would wait for ever,
    # instead of raising an error.
    raw.lock = nullcontext()
    return PostgreSQLNodeSession(raw)


def unknown_parameters(params: Iterable[str]) -> list[str]:
    """Return those of ``params`` that ``psycopg.connect`` does not know. Does not connect to a
    server.
    """
    of_library = {option.keyword.decode() for option in Conninfo.get_defaults()}
    of_driver = {
        parameter.name
        for parameter in signature(psycopg.Connection.connect).parameters.values()
        if parameter.kind is not Parameter.VAR_KEYWORD
    }
    return sorted({*params} - of_library - of_driver)


def _poller(descriptor: int) -> Callable[[int], Any]:
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(descriptor, _POLL_FOR)
        return poll.poll
    return lambda timeout: select.select([descriptor], [], [], timeout / 1000)[0]
