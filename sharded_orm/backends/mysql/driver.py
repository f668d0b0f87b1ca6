"""Forward attributes of ``MySQLdb.Connection`` from a virtual connection to a physical session.

A virtual connection is the ``connection`` of a Django alias. It leases a physical session of the node
when it needs one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from MySQLdb.connections import Connection

from sharded_orm.backends.mysql.session import NodeSession

# Attributes of the driver's connection that leave the session's state as it is. Any session of the
# node can serve them. Access to any other attribute pins a session: the alias keeps it until
# close(), because the program may change its state.
_STATELESS = frozenset([
    "character_set_name", "client_flag", "converter", "dump_debug_info", "encoders", "encoding",
    "escape_string", "get_character_set_info", "get_host_info", "get_proto_info",
    "get_server_info", "host", "kill", "literal", "ping", "port", "server_capabilities", "stat",
    "string_literal", "thread_id", "user",
])  # fmt: skip

# Methods of the driver's connection that send any SQL. The SQL may commit implicitly, so the writes
# of the transaction are announced first.
_STATEMENTS = frozenset(["query", "send_query"])


class DriverFace:
    """Base class of the virtual connection: lets the program use it like a connection of the
    driver.

    It forwards attributes to the driver's connection of a leased session. Access to an attribute
    that may change the state of the session, such as ``query``, pins the session: the alias keeps
    it until close().
    """

    __slots__ = ()

    def any_session(self) -> AbstractContextManager[NodeSession]:
        """Return a context manager that yields any session of the node: the one that the connection
        holds, or one leased only for the block.

        The block must not change the state of the session.
        """
        raise NotImplementedError

    def announce_implicit_commit(self) -> None:
        """Announce the writes of the transaction, because the next statement or call may commit
        them implicitly.
        """
        raise NotImplementedError

    def pin(self, reason: str) -> NodeSession:
        """Keep one session until close(), as Django's own backend does. Return the session.

        :param reason: the operation that leaves state in the session. It is only logged.
        """
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def escape(self, value: Any, mapping: Any = None) -> Any:
        """Escape ``value`` like the driver's method. Django's schema editor calls this."""
        with self.any_session() as session:
            return session.raw.escape(value, session.raw.encoders if mapping is None else mapping)

    def begin(self) -> None:
        self.announce_implicit_commit()
        self.pin("connection.begin").run(b"BEGIN")

    def __enter__(self) -> DriverFace:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        if name in _STATELESS:
            with self.any_session() as session:
                value = getattr(session.raw, name)
            return self._stateless(name) if callable(value) else value
        if name.startswith("__") or not hasattr(Connection, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        # The program may change the session's state by this attribute. So pin the session: keep it
        # until close().
        if name in _STATEMENTS:
            self.announce_implicit_commit()
        return getattr(self.pin(f"connection.{name}").raw, name)

    def _stateless(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.any_session() as session:
                return getattr(session.raw, name)(*args, **kwargs)

        return call
