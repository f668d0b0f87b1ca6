"""Locks on schemas, taken with ``GET_LOCK``. A lock ends when it is released, or when its session ends."""

from __future__ import annotations

from hashlib import md5

from sharded_orm.backends.mysql.session import NodeSession

# The largest number of characters in a lock's name on MySQL.
_MAX_LENGTH = 64


def take(session: NodeSession, schema: str, seconds: float) -> bool:
    """Take the named lock for ``schema`` in ``session``, and make ``schema`` its current schema.

    Return False if another session still holds the lock after ``seconds``.
    """
    ((is_taken,),) = session.rows_in(schema, f"SELECT GET_LOCK({_name(schema)}, {seconds:f})")[0]
    return bool(int(is_taken or 0))


def release(session: NodeSession, schema: str) -> None:
    session.run(b"DO RELEASE_LOCK(%s)" % _name(schema).encode())


def _name(schema: str) -> str:
    name = f"sharded_orm:{schema}"
    if len(name) > _MAX_LENGTH:
        name = f"sharded_orm:{md5(name.encode(), usedforsecurity=False).hexdigest()}"
    return f"0x{name.encode().hex()}"
