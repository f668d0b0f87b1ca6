"""The cache servers of the project, and which of them holds which entries.

All entries of a *place* are on the same server. A place is one shard, or one global model (whose
rows are not on shards).
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

#: A function that returns the servers of an alias of ``CACHES``, in the order of the alias's
#: LOCATION.
Opener = Callable[[str, CacheOptions], Sequence[CacheServer]]


class Holder(NamedTuple):
    """A cache server that may hold entries of a place (a shard or a global model). So each write to
    the place must be announced to this server.

    :param objects: whether the server may hold objects (cached rows) of the place.
    :param lists: whether the server may hold lists (results of queries) of the place.
    """

    server: CacheServer
    objects: bool
    lists: bool


class CacheClient:
    """The cache servers of the project, and the statistics of the cache. Thread-safe.

    ``runtime.cache()`` returns the instance. If an alias has several servers, all entries of a
    place (a shard or a global model) are on the same one. While a server is down, no other server
    takes over its entries. Otherwise the server would miss the writes of that time, and would later
    return stale entries.

    :param open_servers: returns the servers of an alias, without connecting to them.
    :raises ImproperlyConfigured: ``CACHES`` lacks an alias that ``options`` names, or the alias
        cannot be used for this cache. Or an alias of ALSO_MARK has another KEY_PREFIX or VERSION
        than OBJECTS and LISTS.
    """

    def __init__(self, options: CacheOptions, open_servers: Opener = open_alias) -> None:
        self.options = options
        #: The names of all entries begin with this prefix, so that several projects can share a
        #: cache server.
        self.prefix = name_prefix(options.objects, options.lists) + (
            f"{options.prefix}:" if options.prefix else ""
        )
        self.object_servers = self.list_servers = tuple(open_servers(options.objects, options))
        # Whether the objects (cached rows) and the lists (results of queries) of a place are always
        # on the same server.
        self.shares_store = True
        if options.lists != options.objects:
            lists = tuple(open_servers(options.lists, options))
            # Two aliases may name the same servers in the same order. Then the objects and the
            # lists of a place are on the same server, as with one alias.
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
        # These three dicts remember the results of objects(), lists() and holders(), keyed by place
        # (the alias of a shard, or the type name of a global model).
        self._objects: dict[str, CacheServer] = {}
        self._lists: dict[str, CacheServer] = {}
        self._holders: dict[str, tuple[Holder, ...]] = {}
        self.statistics = CacheStatistics(self.prefix, self.objects)

    @property
    def guard_ttl(self) -> float:
        """Seconds after which a guard expires, unless its life is prolonged.

        A *guard* is the entry that says whether the objects and lists of a set of rows are still
        valid, so it must outlive them. The guard's life is prolonged by each write to these rows,
        and whenever one of these objects or lists is stored.
        """
        return self.options.ttl * 2

    def objects(self, place: str) -> CacheServer:
        """Return the server that holds the objects (cached rows) of ``place``.

        The server also holds the guards of the objects: entries that say whether the objects are
        valid.

        :param place: the alias of a shard, or the type name of a global model.
        """
        try:
            return self._objects[place]
        except KeyError:
            servers = self.object_servers
            return self._objects.setdefault(place, servers[node_index(place, len(servers))])

    def lists(self, place: str) -> CacheServer:
        """Return the server that holds the lists and counts (results of queries) of ``place``.

        The server also holds the guards of the lists: entries that say whether the lists are valid.

        :param place: the alias of a shard, or the type name of a global model.
        """
        try:
            return self._lists[place]
        except KeyError:
            servers = self.list_servers
            return self._lists.setdefault(place, servers[node_index(place, len(servers))])

    def holders(self, place: str) -> tuple[Holder, ...]:
        """Return all servers that may hold entries of ``place``, each once.

        Each write to ``place`` must be announced to all of them.

        :param place: the alias of a shard, or the type name of a global model.
        """
        try:
            return self._holders[place]
        except KeyError:
            return self._holders.setdefault(place, tuple(self._find_holders(place)))

    def _find_holders(self, place: str) -> list[Holder]:
        objects, lists = self.objects(place), self.lists(place)
        # Compare the names of the servers, because two aliases of ``CACHES`` may lead to the same
        # server.
        is_same = lists.name == objects.name
        holders = {objects.name: Holder(objects, True, is_same)}
        if not is_same:
            holders[lists.name] = Holder(lists, False, True)
        for servers in self._also:
            # Add the servers of the setting ALSO_MARK. They may hold objects and lists of other
            # processes, for example while the project changes its cache servers.
            server = servers[node_index(place, len(servers))]
            known = holders.get(server.name)
            holders[server.name] = Holder(server if known is None else known.server, True, True)
        return list(holders.values())

    @property
    def servers(self) -> tuple[CacheServer, ...]:
        """All cache servers, each once: those for objects, then for lists, then for ALSO_MARK."""
        also = [server for servers in self._also for server in servers]
        by_name: dict[str, CacheServer] = {}
        for server in (*self.object_servers, *self.list_servers, *also):
            by_name.setdefault(server.name, server)
        return tuple(by_name.values())

    def type_name(self, label: str) -> str:
        """Return how the names of all cache entries of a model begin: the prefix, followed by the
        label.

        :param label: the model's ``app_label.ModelName``.
        """
        return self.prefix + label

    def close(self) -> None:
        """Close the idle connections to all servers. The next call opens new ones."""
        for servers in (self.object_servers, self.list_servers, *self._also):
            for server in servers:
                server.close()
