"""Physical sessions (server connections) of MySQL and MariaDB. A node's pool keeps and leases them."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from MySQLdb import InternalError, MySQLError, OperationalError, ProgrammingError
from MySQLdb.connections import Connection
from MySQLdb.constants import FIELD_TYPE
from MySQLdb.converters import Thing2Str
from MySQLdb.times import DateTime_or_None

from sharded_orm.backends.write_hooks.session_id import SessionID
from sharded_orm.forks import send_nowhere
from sharded_orm.mysql_flavor import FLAVORS

_POLL_FOR = getattr(select, "POLLIN", 0) | getattr(select, "POLLPRI", 0)
_SYNTAX_ERROR = 1064
_CLOSE_ATTEMPTS = 1000
# Seconds between two attempts to close a session.
_BUSY = 0.001

#: Sent before a query of LAST_INSERT_ID() if the alias has inserted no row. Otherwise the query
#: might return the id of a row that another alias has inserted on the same session.
FORGET_INSERT_ID = b"SET last_insert_id=0"
# Error codes after which the server closes the session. For example, the server shuts down, the
# network has failed, or the session was killed or was idle for too long.
_FATAL = frozenset([1053, *range(1152, 1162), *(flavor.session_ended for flavor in FLAVORS)])


def is_lost(exc: BaseException) -> bool:
    """Whether the error ``exc`` means that the session has ended, or that its state is unknown."""
    if not isinstance(exc, MySQLError) or not exc.args or not isinstance(exc.args[0], int):
        return True
    code = exc.args[0]
    return code == 0 or 2000 <= code < 3000 or code in _FATAL


def is_syntax_error(exc: BaseException) -> bool:
    return isinstance(exc, MySQLError) and exc.args[:1] == (_SYNTAX_ERROR,)


class NodeSession:
    """A physical session with a node's server. While it is idle in the pool, it is in autocommit.

    To save time, code that runs for each statement calls C functions of the driver directly. They
    are attributes of the session, such as ``query``.
    """

    __slots__ = (
        "__weakref__", "affected_rows", "autocommits", "busy", "close_at", "identity", "insert_id", "inserter", "last_user", "literal",
        "more_results", "next_result", "permit", "poll", "query", "raw", "retired", "schema", "split",
        "store_result", "stored", "suspect", "user", "warning_count", "writes_digits",
    )  # fmt: skip

    def __init__(self, raw: Connection, *, split: bool = False) -> None:
        self.raw = raw
        #: Name of the current schema; None if it is unknown. It is None while a packet is sent,
        #: until the whole packet has succeeded, because it is not certain before that whether USE
        #: was executed. If another session drops the schema and creates it again, the name stays
        #: right, but this session goes on using the old character set for new tables.
        self.schema: str | None = None
        #: Whether each statement is sent in a packet of its own, because the project's OPTIONS have
        #: switched multi-statements off.
        self.split = split
        #: Whether the first result of the last statement has been read completely. It is set to
        #: False just before a statement is sent. Even if it is True, further results of the
        #: statement may be unread.
        self.stored = True
        #: Whether a cursor still has to read results from this session, so that no other statement
        #: can run. Used only while a virtual connection (the ``connection`` of a Django alias)
        #: holds the session.
        self.busy = False
        self.close_at: float | None = None
        self.suspect = False
        self.retired = False
        self.user = 0
        self.permit: object | None = None
        #: The identity of this session: its server, its account and its id. None until the server
        #: was queried for it.
        self.identity: SessionID | None = None
        #: The virtual connection (the ``connection`` of a Django alias) that used this session last.
        self.last_user: object = None
        #: The virtual connection (the ``connection`` of a Django alias) that was the last to insert
        #: a row with an id on this session. Only this connection may query LAST_INSERT_ID() here.
        #: (An insert with an explicit id sets this attribute, too, although it leaves
        #: LAST_INSERT_ID() as it is.)
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
        #: Whether the driver writes an int simply as its digits. OPTIONS["conv"] may change that.
        self.writes_digits = raw.encoders.get(int) is Thing2Str

    def send(self, prefix: Sequence[bytes], statement: bytes) -> int:
        """Send the statements ``prefix`` and then ``statement``, all in one packet.

        Return the number of prefix statements. The caller has to fetch the result of ``statement``.
        If the driver raises an error, the error's attribute ``prefix_done`` says how many prefix
        statements have succeeded.
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
                # One more statement of ``prefix`` is done, and has no rows to fetch. If
                # next_result() raises an error, the next statement has caused it.
                done += 1
                if self.next_result() != 0:
                    raise InternalError(0, "the server answered less than it was asked")
        except MySQLError as exc:
            exc.prefix_done = done
            raise
        return done

    def bind(self, query: str | bytes | bytearray, args: Any) -> bytes:
        """Return the statement with its parameters filled in, as the cursors of ``MySQLdb`` do it."""
        if isinstance(query, str):
            statement = query.encode(self.raw.encoding)
        else:
            # Copy a bytearray, because the driver needs an immutable buffer.
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
        elif self.writes_digits:
            # Format integers here, which takes a sixth of the time of the driver's literal(). A
            # statement with a list of ids has many of them.
            values = tuple(
                [b"%d" % value if type(value) is int else literal(value) for value in args]
            )
        else:
            values = tuple([literal(value) for value in args])
        try:
            bound: bytes = statement % values
        except TypeError as exc:
            raise ProgrammingError(str(exc)) from exc
        return bound

    def run(self, *statements: bytes) -> None:
        """Run statements that return no rows, all in one packet."""
        if not self.split:
            statements = (b"; ".join(statements),)
        for statement in statements:
            self.stored = False
            self.query(statement)
            # Skip the results, because these statements have no rows to fetch.
            while self.next_result() == 0:
                pass
            self.stored = True

    def run_each(self, *statements: bytes) -> list[int]:
        """Run statements in one packet, and drop their rows. Return a list with one id for each
        statement: the id of the row that it has inserted, or 0 if it has inserted none.

        If a statement fails, the server executes none of the later ones. The driver's error then
        has the attribute ``prefix_done``, the number of statements that have succeeded.
        """
        ids: list[int] = []
        self.stored = False
        try:
            self.query(b"; ".join(statements))
            while True:
                self.store_result()
                ids.append(self.insert_id())
                if self.next_result() != 0:
                    break
        except MySQLError as exc:
            exc.prefix_done = len(ids)
            raise
        if len(ids) != len(statements):
            raise InternalError(0, "the server answered less than it was asked")
        self.stored = True
        return ids

    def rows_in(self, schema: str, *statements: str) -> list[list[tuple[Any, ...]]]:
        """Run statements in ``schema``, all in one packet. Return a list of rows for each statement."""
        parts = [statement.encode(self.raw.encoding) for statement in statements]
        if self.schema != schema:
            parts.insert(0, b"USE `%s`" % schema.replace("`", "``").encode())
        self.schema = None
        results: list[list[tuple[Any, ...]]] = []
        self.stored = False
        for packet in parts if self.split else [b"; ".join(parts)]:
            self.query(packet)
            while True:
                result = self.store_result()
                results.append(list(result.fetch_row(0)) if result is not None else [])
                if self.next_result() != 0:
                    break
        self.stored = True
        self.schema = schema
        return results[len(results) - len(statements) :]

    def fetch_last(self, prefix: Sequence[bytes], statement: bytes) -> tuple[Any, ...]:
        """Run ``prefix`` and ``statement`` in one packet. Return the only row of ``statement``."""
        self.send(prefix, statement)
        row: tuple[Any, ...] = self.store_result().fetch_row(1, 0)[0]
        self.stored = True
        return row

    def fetch_one(self, statement: bytes) -> tuple[Any, ...]:
        self.query(statement)
        row: tuple[Any, ...] = self.store_result().fetch_row(1, 0)[0]
        return row

    def is_in_order(self, exc: BaseException) -> bool:
        """Whether the session can still be used after one of its statements has raised ``exc``.

        True if the server has only refused the statement, or if Python code raised an exception
        after all results had been read. Otherwise False.
        """
        if isinstance(exc, MySQLError):
            return not is_lost(exc)
        return isinstance(exc, Exception) and self.stored and not self.more_results()

    def drain(self) -> None:
        """Read and discard all results of the last statement that are still unread."""
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
                    return
                # Another thread is using the driver's connection, perhaps to free a result. Try
                # again: a session left open would keep its transaction and its locks on the server.
                # Wait for a fixed time, because the driver does not signal when the thread is done.
                time.sleep(_BUSY)
            except MySQLError:
                return
            else:
                return

    def abandon(self) -> None:
        """Make this session unusable in a forked child, without sending anything to the server.

        The session belongs to the parent process, which goes on using it.
        """
        try:
            descriptor = self.raw.fileno()
        except MySQLError:
            return
        send_nowhere(descriptor)


def connect(params: Mapping[str, Any]) -> NodeSession:
    """Open a session in autocommit, without a current schema.

    :param params: arguments of ``MySQLdb.connect``.
    :raises ImproperlyConfigured: the driver does not know an argument, or refuses its type.
    """
    try:
        raw = Connection(**params)
    except TypeError as exc:
        raise ImproperlyConfigured(f"The driver refuses OPTIONS: {exc}.") from exc
    # Remove the driver's encoder for bytes, which does not work, as Django's MySQL backend does.
    if raw.encoders.get(bytes) is bytes:
        raw.encoders.pop(bytes)
    for kind in (FIELD_TYPE.DATETIME, FIELD_TYPE.TIMESTAMP):
        if raw.converter.get(kind) is DateTime_or_None:
            raw.converter[kind] = datetime_or_none
    return NodeSession(raw, split=not params.get("multi_statements", True))


def check_parameters(params: Mapping[str, Any]) -> None:
    """Check that the driver accepts ``params``. Does not connect to any server.

    The driver has no list of its arguments, but it checks them before it connects. So this function
    makes the driver connect to a file that is no socket. This always fails. If the error is that of
    a failed connection, the arguments were right.

    :param params: arguments of ``MySQLdb.connect``.
    :raises ImproperlyConfigured: the driver refuses them.
    """
    # Leave out options that make the driver read a file. The file might name another protocol than
    # the socket, and the driver would then connect to a server.
    own = {k: v for k, v in params.items() if not k.startswith("read_default_")}
    try:
        connect({**own, "host": "localhost", "unix_socket": os.devnull}).close()
    except OperationalError:
        return
    except (MySQLError, ValueError) as exc:
        raise ImproperlyConfigured(f"The driver refuses OPTIONS: {exc}.") from exc


def datetime_or_none(text: Any) -> Any:
    """Return the same as the driver's ``DateTime_or_None()``, in a seventh of its time."""
    # A datetime has 19 characters without microseconds, and 26 with six digits of them. Texts of
    # another length are parsed by the driver's function.
    if len(text) in (19, 26):
        try:
            return datetime.fromisoformat(text)
        except (TypeError, ValueError):
            pass
    return DateTime_or_None(text)


def _poller(descriptor: int) -> Callable[[int], Any]:
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(descriptor, _POLL_FOR)
        return poll.poll
    return lambda timeout: select.select([descriptor], [], [], timeout / 1000)[0]
