"""The part of the interface of ``MySQLdb.Connection`` that a virtual connection offers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from MySQLdb.connections import Connection

from sharded_orm.backends.mysql.session import NodeSession

# Attributes that any session of the node can answer, and that leave no state there. Any other
# unknown name pins the session.
_STATELESS = frozenset([
    "character_set_name", "client_flag", "converter", "dump_debug_info", "encoders", "encoding",
    "escape_string", "get_character_set_info", "get_host_info", "get_proto_info",
    "get_server_info", "host", "kill", "literal", "ping", "port", "server_capabilities", "stat",
    "string_literal", "thread_id", "user",
])  # fmt: skip


class DriverFace:
    """Answers for the driver's connection. What may leave state in a session pins it."""

    __slots__ = ()

    def any_session(self) -> AbstractContextManager[NodeSession]:
        """The held session, or one for the length of the block, which must not change its state."""
        raise NotImplementedError

    def pin(self, reason: str) -> NodeSession:
        """Keep a session until close(); the connection then behaves as one of Django's backend."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def escape(self, value: Any, mapping: Any = None) -> Any:
        """As the driver's; used by Django's schema editor."""
        with self.any_session() as session:
            return session.raw.escape(value, session.raw.encoders if mapping is None else mapping)

    def begin(self) -> None:
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
        # The attribute may change the session.
        return getattr(self.pin(f"connection.{name}").raw, name)

    def _stateless(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.any_session() as session:
                return getattr(session.raw, name)(*args, **kwargs)

        return call
