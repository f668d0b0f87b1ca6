"""The cache servers of the project, and which of them holds the entries of each place.

A *place* is a shard, or a global model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from django.core.exceptions import ImproperlyConfigured

from sharded_orm.cache.keys import node_index
from sharded_orm.cache.statistics import CacheStatistics
from sharded_orm.cache.stores.base import CacheServer
from sharded_orm.cache.stores.factory import name_prefix
from sharded_orm.cache.stores.factory import open_servers as open_alias
from sharded_orm.conf import CacheOptions

#: The servers behind an alias of ``CACHES``, in the order of its LOCATION.
Opener = Callable[[str, CacheOptions], Sequence[CacheServer]]


class Holder(NamedTuple):
    """A server that must be marked for writes to a place, and the entries that it holds of it."""

    server: CacheServer
    objects: bool
    lists: bool


class CacheClient:
    """The cache servers of the project, and the statistics of the cache. Thread-safe.

    Only ``runtime.cache()`` makes one. All entries of a place are on one server of an alias, and
    on no other while that is down: the server would miss writes and be stale when it returns.

    :param open_servers: returns the servers of an alias, without a call to any.
    :raises ImproperlyConfigured: ``CACHES`` has no such alias, or one that cannot be used.
    """

    def __init__(self, options: CacheOptions, open_servers: Opener = open_alias) -> None:
        self.options = options
        #: The beginning of all names, which keeps projects apart that share a server.
        self.prefix = name_prefix(options.objects, options.lists) + (
            f"{options.prefix}:" if options.prefix else ""
        )
        self.object_servers = self.list_servers = tuple(open_servers(options.objects, options))
        #: Whether objects and lists are on the same servers.
        self.shares_store = True
        if options.lists != options.objects:
            lists = tuple(open_servers(options.lists, options))
            # Two aliases may name the same servers. A place has the same one of them if they
            # stand in the same order.
            if [server.name for server in lists] != [s.name for s in self.object_servers]:
                self.list_servers = lists
                self.shares_store = False
        if name_prefix(options.objects, options.lists, *options.also_mark) != name_prefix(
            options.objects, options.lists
        ):
            raise ImproperlyConfigured(
                f"SHARDED_ORM['CACHE'] ALSO_MARK {list(options.also_mark)!r}: KEY_PREFIX and VERSION"
                " must be those of OBJECTS and LISTS, or nothing there would be found."
            )
        self._also = [tuple(open_servers(alias, options)) for alias in options.also_mark]
        # One entry per place.
        self._objects: dict[str, CacheServer] = {}
        self._lists: dict[str, CacheServer] = {}
        self._holders: dict[str, tuple[Holder, ...]] = {}
        self.statistics = CacheStatistics(self.prefix, self.objects)

    @property
    def guard_ttl(self) -> float:
        """Seconds that a guard lives after its last use: longer than the entries under it."""
        return self.options.ttl * 2

    def objects(self, place: str) -> CacheServer:
        """The server of the objects of ``place``, and of their guards."""
        try:
            return self._objects[place]
        except KeyError:
            servers = self.object_servers
            return self._objects.setdefault(place, servers[node_index(place, len(servers))])

    def lists(self, place: str) -> CacheServer:
        """The server of the lists and counts of ``place``, and of their guards."""
        try:
            return self._lists[place]
        except KeyError:
            servers = self.list_servers
            return self._lists.setdefault(place, servers[node_index(place, len(servers))])

    def holders(self, place: str) -> tuple[Holder, ...]:
        """The servers that must be marked for writes to ``place``, each once."""
        try:
            return self._holders[place]
        except KeyError:
            return self._holders.setdefault(place, tuple(self._find_holders(place)))

    def _find_holders(self, place: str) -> list[Holder]:
        objects, lists = self.objects(place), self.lists(place)
        # Two aliases may name one server.
        is_same = lists.name == objects.name
        holders = {objects.name: Holder(objects, True, is_same)}
        if not is_same:
            holders[lists.name] = Holder(lists, False, True)
        for servers in self._also:
            # Elsewhere, the server may hold both objects and lists of the place.
            server = servers[node_index(place, len(servers))]
            known = holders.get(server.name)
            holders[server.name] = Holder(server if known is None else known.server, True, True)
        return list(holders.values())

    @property
    def servers(self) -> tuple[CacheServer, ...]:
        """All servers, each once; those of objects first."""
        also = [server for servers in self._also for server in servers]
        by_name: dict[str, CacheServer] = {}
        for server in (*self.object_servers, *self.list_servers, *also):
            by_name.setdefault(server.name, server)
        return tuple(by_name.values())

    def type_name(self, label: str) -> str:
        """The beginning of the names of the model with this label."""
        return self.prefix + label

    def close(self) -> None:
        """Close idle connections. The next call opens new ones."""
        for servers in (self.object_servers, self.list_servers, *self._also):
            for server in servers:
                server.close()
