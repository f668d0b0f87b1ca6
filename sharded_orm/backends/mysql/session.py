"""A physical session with a server, as the pool keeps it."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence
from typing import Any

from MySQLdb import InternalError, MySQLError, ProgrammingError
from MySQLdb.connections import Connection

from sharded_orm.backends.write_hooks.session_id import SessionID
from sharded_orm.forks import send_nowhere

_POLL_FOR = getattr(select, "POLLIN", 0) | getattr(select, "POLLPRI", 0)
_SYNTAX_ERROR = 1064
_CLOSE_ATTEMPTS = 1000
_BUSY = 0.001  # seconds
#: One that inserted nothing must not read the id of what others inserted.
FORGET_INSERT_ID = b"SET last_insert_id=0"
# Server errors after which the server closes the connection: shutdown, network trouble,
# killed (MariaDB), idle for too long (MySQL).
_FATAL = frozenset([1053, *range(1152, 1162), 1927, 4031])


def is_lost(exc: BaseException) -> bool:
    """Whether ``exc`` says that the session is gone, or in an unknown state."""
    if not isinstance(exc, MySQLError) or not exc.args or not isinstance(exc.args[0], int):
        return True
    code = exc.args[0]
    return code == 0 or 2000 <= code < 3000 or code in _FATAL


def is_syntax_error(exc: BaseException) -> bool:
    return isinstance(exc, MySQLError) and exc.args[:1] == (_SYNTAX_ERROR,)


class NodeSession:
    """One connection to a node; always in autocommit when it is idle.

    The C functions of the driver are bound once: the hot path calls them directly.
    """

    __slots__ = (
        "__weakref__", "affected_rows", "autocommits", "busy", "close_at", "identity", "insert_id", "inserter", "last_user", "literal",
        "more_results", "next_result", "poll", "query", "raw", "retired", "schema", "split",
        "store_result", "stored", "suspect", "user", "warning_count",
    )  # fmt: skip

    def __init__(self, raw: Connection, *, split: bool = False) -> None:
        self.raw = raw
        #: The current schema, None for unknown. Invariant: never wrong. It is set to None
        #: before anything is sent and named again only after all of it succeeded. By its name:
        #: of one that was dropped and made anew the session keeps the former character set.
        self.schema: str | None = None
        #: Send prefixes as statements of their own (multi-statements are switched off).
        self.split = split
        #: Nothing of the last statement is left to be read from the socket, except further
        #: results. Set to False before a statement is sent.
        self.stored = True
        #: A cursor has results to read on it, while the connection holds it.
        self.busy = False
        self.close_at: float | None = None
        self.suspect = False
        self.retired = False
        self.user = 0
        #: Who it is on its server, once that was asked.
        self.identity: SessionID | None = None
        #: The virtual connection that used it last.
        self.last_user: object = None
        #: The one whose insert LAST_INSERT_ID() tells of. (An insert that names its id
        #: itself counts as well, though the function then tells of an earlier one.)
        self.inserter: object = None
        self.poll = _poller(raw.fileno())
        base: Any = super(Connection, raw)
        self.query: Callable[[bytes], None] = base.query
        self.store_result = raw.store_result
        self.next_result: Callable[[], int] = raw.next_result
        self.more_results: Callable[[], bool] = raw.more_results
        self.autocommits: Callable[[], bool] = raw.get_autocommit
        self.affected_rows: Callable[[], int] = raw.affected_rows
        self.insert_id: Callable[[], int] = raw.insert_id
        self.warning_count: Callable[[], int] = raw.warning_count
        self.literal: Callable[[Any], bytes] = raw.literal

    def send(self, prefix: Sequence[bytes], statement: bytes) -> int:
        """Run ``prefix`` and ``statement`` in one packet, up to the statement's result.

        Returns the number of prefix statements, all done; if one fails, the error has the
        attribute ``prefix_done``.
        """
        done = 0
        self.stored = False
        try:
            if self.split:
                for part in prefix:
                    self.query(part)
                    self.store_result()
                    done += 1
                self.query(statement)
                return done
            self.query(b"; ".join([*prefix, statement]))
            for _ in prefix:
                # It answered with an OK packet: nothing to fetch. An error now is that of
                # the next part.
                done += 1
                if self.next_result() != 0:
                    raise InternalError(0, "the server answered less than it was asked")
        except MySQLError as exc:
            exc.prefix_done = done
            raise
        return done

    def bind(self, query: str | bytes | bytearray, args: Any) -> bytes:
        """The statement with its parameters, as ``MySQLdb`` binds them."""
        if isinstance(query, str):
            statement = query.encode(self.raw.encoding)
        else:
            # The driver needs a buffer that nobody changes.
            statement = bytes(query)
        if args is None:
            return statement
        literal = self.literal
        values: Any
        if isinstance(args, dict):
            encoding = self.raw.encoding
            values = {
                key.encode(encoding) if isinstance(key, str) else key: literal(value)
                for key, value in args.items()
            }
        else:
            values = tuple([literal(value) for value in args])
        try:
            bound: bytes = statement % values
        except TypeError as exc:
            raise ProgrammingError(str(exc)) from exc
        return bound

    def run(self, *statements: bytes) -> None:
        """Run statements that return no rows, in one packet."""
        if not self.split:
            statements = (b"; ".join(statements),)
        for statement in statements:
            self.stored = False
            self.query(statement)
            # Each answers with an OK packet: nothing to fetch.
            while self.next_result() == 0:
                pass
            self.stored = True

    def rows_in(self, schema: str, *statements: str) -> list[list[tuple[Any, ...]]]:
        """The rows of each statement, run one after the other in ``schema``; one packet."""
        parts = [statement.encode(self.raw.encoding) for statement in statements]
        if self.schema != schema:
            parts.insert(0, b"USE `%s`" % schema.replace("`", "``").encode())
        # See the invariant of the attribute.
        self.schema = None
        found: list[list[tuple[Any, ...]]] = []
        self.stored = False
        for packet in parts if self.split else [b"; ".join(parts)]:
            self.query(packet)
            while True:
                result = self.store_result()
                found.append(list(result.fetch_row(0)) if result is not None else [])
                if self.next_result() != 0:
                    break
        self.stored = True
        self.schema = schema
        return found[len(found) - len(statements) :]

    def fetch_one(self, statement: bytes) -> tuple[Any, ...]:
        self.query(statement)
        row: tuple[Any, ...] = self.store_result().fetch_row(1, 0)[0]
        return row

    def is_in_order(self, exc: BaseException) -> bool:
        """Whether the session can go on after ``exc`` was raised while it ran a statement.

        Yes after an error of the server that concerns the statement; yes if something on
        the client failed when all had been read.
        """
        if isinstance(exc, MySQLError):
            return not is_lost(exc)
        return isinstance(exc, Exception) and self.stored and not self.more_results()

    def drain(self) -> None:
        """Read and drop the results that are still to come."""
        while self.next_result() == 0:
            self.raw.discard_result()
        self.stored = True

    def ping(self) -> bool:
        try:
            self.raw.ping()
        except MySQLError:
            return False
        return True

    def close(self) -> None:
        for _ in range(_CLOSE_ATTEMPTS):
            try:
                self.raw.close()
            except ProgrammingError:
                if not self.raw.open:
                    return  # Closed already: what was wanted.
                # The driver is busy with it in another thread, which frees a result, say. Left
                # open it would keep its transaction, and its locks, on the server.
                time.sleep(_BUSY)  # The driver tells nobody when that is over.
            except MySQLError:
                return
            else:
                return

    def abandon(self) -> None:
        """Let go of the socket without a word to the server (it is the parent process's)."""
        try:
            descriptor = self.raw.fileno()
        except MySQLError:
            return
        send_nowhere(descriptor)


def connect(params: dict[str, Any]) -> NodeSession:
    """Open a session in autocommit, with no schema.

    :param params: of ``MySQLdb.connect``.
    """
    raw = Connection(**params)
    # As Django's backend does: mysqlclient's encoder of bytes does not work.
    if raw.encoders.get(bytes) is bytes:
        raw.encoders.pop(bytes)
    return NodeSession(raw, split=not params.get("multi_statements", True))


def _poller(descriptor: int) -> Callable[[int], Any]:
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(descriptor, _POLL_FOR)
        return poll.poll
    return lambda timeout: select.select([descriptor], [], [], timeout)[0]
