"""Named points in the code of the library, at which a process may stop or die.

========== =======================================================================
marking    before a cache server is marked
committing after all marks, immediately before COMMIT or a statement in autocommit is sent
closing    after COMMIT (or ROLLBACK), before objects are deleted and markers closed
half       objects are deleted, markers still open
reading    before entries are read
querying   before the library sends SQL
queried    after the SQL, when the rows have arrived
filling    before entries are stored
========== =======================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _nothing(point: str) -> None:
    pass


#: Called with the name of each point. A process sets its own handler.
handler: Callable[[str], None] = _nothing


def set_handler(new: Callable[[str], None]) -> None:
    global handler
    handler = new


def servers() -> list[Any]:
    """Return the classes of cache servers."""
    from sharded_orm.cache.stores import base, memcached
    from sharded_orm.cache.stores.redis import server

    assert memcached
    assert server
    classes, todo = [], [base.CacheServer]
    while todo:
        kind = todo.pop()
        todo += kind.__subclasses__()
        classes.append(kind)
    return classes


def wrap(cls: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a method of ``cls`` itself by ``wrapper(method, self, *args, **kwargs)``."""
    method = cls.__dict__[name]

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(method, self, *args, **kwargs)

    setattr(cls, name, wrapped)


def without_read_again() -> None:
    """Let the servers read known objects by ``read()``, so that an ablation need only replace this."""
    from sharded_orm.cache.stores.base import CacheServer

    for cls in servers():
        cls.read_again = CacheServer.read_again


def implements(cls: Any, name: str) -> bool:
    """Whether ``cls`` itself has the method, and not as an abstract one."""
    method = cls.__dict__.get(name)
    return method is not None and not getattr(method, "__isabstractmethod__", False)


def _mark(method: Any, server: Any, *args: Any, **kwargs: Any) -> Any:
    handler("marking")
    return method(server, *args, **kwargs)


def _finish(method: Any, server: Any, objects: Any, records: Any, lost: Any = None) -> Any:
    handler("closing")
    if objects and records:
        method(server, objects, ())
        handler("half")
    return method(server, objects, records, lost)


def _fill(method: Any, server: Any, entries: Any, *args: Any, **kwargs: Any) -> Any:
    if entries:
        handler("filling")
    return method(server, entries, *args, **kwargs)


def _read(method: Any, server: Any, *args: Any, **kwargs: Any) -> Any:
    handler("reading")
    return method(server, *args, **kwargs)


_WRAPPERS = {
    "mark": _mark, "finish": _finish, "fill": _fill, "read": _read, "read_again": _read,
}  # fmt: skip


def install(connection_class: type[Any], commits: Callable[[Any, Any], bool]) -> None:
    """Install the points.

    :param connection_class: the class whose ``_end()`` ends a transaction.
    :param commits: whether that sends COMMIT, given its object and its argument.
    """

    def end(method: Any, connection: Any, how: Any) -> Any:
        if commits(connection, how):
            handler("committing")
        return method(connection, how)

    def announce_within(method: Any, markers: Any, seconds: float) -> Any:
        is_in_time = method(markers, seconds)
        if is_in_time:
            handler("committing")
        return is_in_time

    from sharded_orm.cache.markers import TransactionMarkers

    wrap(TransactionMarkers, "announce_within", announce_within)
    for cls in servers():
        for name, wrapper in _WRAPPERS.items():
            if implements(cls, name):
                wrap(cls, name, wrapper)
    wrap(connection_class, "_end", end)


def watch_queries(aliases: list[str]) -> None:
    """Call the handler before and after each query of these databases."""
    from django.db import connections

    def around(execute: Any, sql: Any, params: Any, many: Any, context: Any) -> Any:
        handler("querying")
        result = execute(sql, params, many, context)
        handler("queried")
        return result

    for alias in aliases:
        connections[alias].execute_wrappers.append(around)
