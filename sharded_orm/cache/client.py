"""The cache as a whole: which server holds what."""

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
    """A server that is told of the writes of a place, and what it has of it."""

    server: CacheServer
    objects: bool
    lists: bool


class CacheClient:
    """The cache servers of the project, and what was counted. Thread-safe.

    Made by ``runtime.cache()`` alone. All that belongs to one place, a shard or a global
    model, is on one server of an alias, and never on another one while that is down: what
    a server missed would be stale when it returns.

    :param open_servers: makes the servers of an alias; asks none of them.
    :raises ImproperlyConfigured: ``CACHES`` has no such alias, or one that cannot be used.
    """

    def __init__(self, options: CacheOptions, open_servers: Opener = open_alias) -> None:
        self.options = options
        #: What all names begin with: as two projects share a server under Django, they do here.
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
            if [one.name for one in lists] != [one.name for one in self.object_servers]:
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
        # As many entries as there are places.
        self._objects: dict[str, CacheServer] = {}
        self._lists: dict[str, CacheServer] = {}
        self._holders: dict[str, tuple[Holder, ...]] = {}
        self.statistics = CacheStatistics(self.prefix, self.objects)

    @property
    def guard_ttl(self) -> float:
        """Seconds that a guard lives from its last use: longer than what it stands for."""
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
        """The servers that are told of the writes of ``place``, each once."""
        try:
            return self._holders[place]
        except KeyError:
            return self._holders.setdefault(place, tuple(self._find_holders(place)))

    def _find_holders(self, place: str) -> list[Holder]:
        objects, lists = self.objects(place), self.lists(place)
        # Two aliases may name one server.
        same = lists.name == objects.name
        found = {objects.name: Holder(objects, True, same)}
        if not same:
            found[lists.name] = Holder(lists, False, True)
        for servers in self._also:
            # It may serve objects or lists of the same place here, and the other elsewhere.
            one = servers[node_index(place, len(servers))]
            known = found.get(one.name)
            found[one.name] = Holder(one if known is None else known.server, True, True)
        return list(found.values())

    @property
    def servers(self) -> tuple[CacheServer, ...]:
        """Each server once; those of objects first."""
        also = [server for servers in self._also for server in servers]
        by_name: dict[str, CacheServer] = {}
        for server in (*self.object_servers, *self.list_servers, *also):
            by_name.setdefault(server.name, server)
        return tuple(by_name.values())

    def type_name(self, label: str) -> str:
        """What the names of the model ``label`` begin with."""
        return self.prefix + label

    def close(self) -> None:
        """Close idle connections. What is used afterwards opens new ones."""
        for servers in (self.object_servers, self.list_servers, *self._also):
            for server in servers:
                server.close()
