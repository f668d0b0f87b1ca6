"""Locks by name that a session holds, together with the statements that run on it."""

from __future__ import annotations

from hashlib import md5

from sharded_orm.backends.mysql.session import NodeSession

_LONGEST = 64  # characters of a name; MySQL takes no more


def take(session: NodeSession, schema: str, seconds: float) -> bool:
    """Lock ``schema``, and make it the current one; whether that came about in time."""
    ((taken,),) = session.rows_in(schema, f"SELECT GET_LOCK({_name(schema)}, {seconds:f})")[0]
    return bool(int(taken or 0))


def release(session: NodeSession, schema: str) -> None:
    session.run(b"DO RELEASE_LOCK(%s)" % _name(schema).encode())


def _name(schema: str) -> str:
    name = f"sharded_orm:{schema}"
    if len(name) > _LONGEST:
        name = f"sharded_orm:{md5(name.encode(), usedforsecurity=False).hexdigest()}"
    return f"0x{name.encode().hex()}"
