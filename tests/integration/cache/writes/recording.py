"""A cache server that records its calls, and fails on demand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sharded_orm.cache.client import CacheClient
from sharded_orm.cache.guards import Guard, parse
from sharded_orm.cache.keys import Scope
from sharded_orm.cache.stores.base import CacheServer, ServerDown


class Recorder(CacheServer):
    """Passes everything on to a real server.

    :param fail: names of methods that fail, before (``mark``) or after (``mark+``) they have
        had their effect.
    :param events: the calls (method, server, names), in one list for all servers of a test.
    """

    def __init__(self, inner: CacheServer, events: list[tuple[str, str, tuple[str, ...]]]) -> None:
        self.inner = inner
        self.name = inner.name
        self.events = events
        self.fail: set[str] = set()
        #: Functions by method name; each is called before the method does anything.
        self.at: dict[str, Callable[[], object]] = {}

    def _run(self, what: str, names: Sequence[str], run: Callable[[], Any]) -> Any:
        self.events.append((what, self.name, tuple(names)))
        self.round_trips += 1
        if (hook := self.at.get(what)) is not None:
            hook()
        if what in self.fail:
            raise ServerDown("it was told to fail")
        result = run()
        if f"{what}+" in self.fail:
            raise ServerDown("it was told to fail afterwards")
        return result

    def read(self, names: Any, objects: Any = (), again: Any = ()) -> Any:
        return self._run("read", names, lambda: self.inner.read(names, objects, again))

    def lease(self, objects: Any, read: Any) -> Any:
        return self.inner.lease(objects, read)

    def release(self, objects: Any) -> None:
        self.inner.release(objects)

    def fill(self, entries: Any, ttl: float, again: Any = ()) -> Any:
        names = [entry.name for entry in entries]
        return self._run("fill", names, lambda: self.inner.fill(entries, ttl, again))

    def mark(self, records: Sequence[tuple[str, bytes]], header: bytes, ttl: float) -> list[int]:
        names = [name for name, _ in records]
        sizes: list[int] = self._run("mark", names, lambda: self.inner.mark(records, header, ttl))
        return sizes

    def finish(
        self,
        objects: Sequence[str],
        records: Sequence[tuple[str, bytes]],
        lost: Callable[[], object] | None = None,
    ) -> None:
        names = [*objects, *(name for name, _ in records)]
        self._run("finish", names, lambda: self.inner.finish(objects, records, lost))

    def add(self, guards: Any, ttl: float) -> list[bytes]:
        return self.inner.add(guards, ttl)

    def replace(self, name: str, seen: bytes, new: bytes, ttl: float) -> bool:
        done: bool = self._run("replace", [name], lambda: self.inner.replace(name, seen, new, ttl))
        return done

    def count(self, deltas: Mapping[str, int]) -> None:
        self.inner.count(deltas)

    def counters(self, names: Sequence[str]) -> list[int]:
        return self.inner.counters(names)

    def reset_counters(self, names: Sequence[str]) -> None:
        self.inner.reset_counters(names)

    def info(self) -> dict[str, Any]:
        return self.inner.info()

    def close(self) -> None:
        self.inner.close()


class Recorded:
    """The cache of one test."""

    def __init__(self, cache: CacheClient, events: list[tuple[str, str, tuple[str, ...]]]) -> None:
        self.cache = cache
        self.events = events

    @property
    def servers(self) -> list[Recorder]:
        return [server for server in self.cache.servers if isinstance(server, Recorder)]

    @property
    def what(self) -> list[str]:
        return [what for what, _, _ in self.events]

    def clear(self) -> None:
        self.events.clear()
        for server in self.servers:
            server.round_trips = 0

    def named(self, what: str) -> set[str]:
        """Return all names in packets of that kind since :meth:`clear`."""
        return {name for kind, _, names in self.events for name in names if kind == what}

    def guard(self, scope: Scope, *, lists: bool = False) -> Guard | None:
        """Return the scope's own guard, as it is stored on the server."""
        server = (self.cache.lists if lists else self.cache.objects)(scope.place)
        assert isinstance(server, Recorder)
        (raw,), _, _ = server.inner.read([scope.guards[-1]])
        return None if raw is None else parse(raw)
