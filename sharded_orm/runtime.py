"""The objects that the settings describe: topology, routing strategies, ticket generator, cache client.

Only this module creates them, each at its first use. All threads share them until :func:`reset`.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from sharded_orm import conf
from sharded_orm.active_config import ActiveConfig
from sharded_orm.backends import pool
from sharded_orm.backends.group import relocation
from sharded_orm.exceptions import UnknownShard
from sharded_orm.routing.base import Strategy, make_strategy
from sharded_orm.routing.directory import DirectoryStore, DirectoryStrategy
from sharded_orm.routing.placement_lease import PermanentLease, PlacementLease
from sharded_orm.topology.aliases import ShardedDatabases
from sharded_orm.topology.document import Document
from sharded_orm.topology.model import Shard, ShardGroup, Topology
from sharded_orm.topology.sources.base import TopologySource
from sharded_orm.topology.watcher import TopologyStatus

if TYPE_CHECKING:
    from sharded_orm.cache.client import CacheClient
    from sharded_orm.ids.tickets.generator import TicketGenerator


def _topology_changed() -> None:
    """Apply a new topology that the topology source has delivered.

    The caller must hold the lock of ``_active``, the object with the configuration.
    """
    _renew_strategies()
    try:
        if _topology is None and isinstance(settings.DATABASES, ShardedDatabases):
            settings.DATABASES.renew_groups()
    finally:
        # Let the connections look up the topology again, even if an error was raised above. After
        # an error, the caller restores the old topology. But a connection may already use the new.
        relocation.topology_changed()


def _renew_strategies() -> None:
    global _strategies, _former
    _former, _strategies = {**_former, **_strategies}, {}


_active = ActiveConfig(_topology_changed)


def _after_fork() -> None:
    if _active.after_fork():
        # This is a forked child. The fork may have happened while a thread of the parent applied a
        # new topology (map of shards to nodes). So create the routing strategies anew.
        # topology_changed() makes the connection objects look up the topology again. That look-up
        # makes the child open its own topology source and watch it.
        _renew_strategies()
        relocation.topology_changed()


os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _stop() -> None:
    if _cache is not None:
        _cache.statistics.flush()
    _active.stop()


_topology: Topology | None = None
_strategies: dict[str, Strategy] = {}
# Maps each group to its routing strategy (which finds the shards of keys) under the previous
# topology. A new strategy takes over what the previous one has in memory, such as the shards of
# recently used keys.
_former: dict[str, Strategy] = {}
_tickets: TicketGenerator | None = None
_cache: CacheClient | None = None
# The prefix of names in the cache that swap_cache_prefix() has set; None means the prefix from the
# settings.
_cache_prefix: str | None = None


def _no_directory(alias: str) -> DirectoryStore:
    raise ImproperlyConfigured(
        "The directory strategy needs its table: add 'sharded_orm' to INSTALLED_APPS."
    )


_directory_store: Callable[[str], DirectoryStore] = _no_directory
# The lease (a permission for a limited time) under which this process remembers the shards of keys.
# All groups share the lease, because they have a common directory, the table that records these
# shards.
_placement_lease: PlacementLease | PermanentLease | None = None


def provide_directory(factory: Callable[[str], DirectoryStore]) -> None:
    """Set the function that opens the directory, the table that records the shard of each key.

    The library's ``AppConfig.ready()`` calls this, because this module cannot import models.

    :param factory: called with the alias of the directory's database; returns the object that reads
        and writes the directory.
    """
    global _directory_store
    _directory_store = factory


def config() -> conf.Config:
    """Return the checked ``SHARDED_ORM`` setting, with the topology of its source.

    The first call loads the topology from its source. After that, a background thread watches the
    source for new topologies, unless the topology is static (in the settings).

    :raises InvalidConfiguration: the setting is wrong.
    :raises TopologyUnavailable: the source does not answer or has no valid topology, and there is no
        local copy of an earlier one (the last good copy).
    """
    # Read _active.current only once: in another thread, reset() may set it to None at any time.
    current = _active.current
    return _active.load() if current is None else current


def source() -> TopologySource:
    """Return the topology source (such as a file or ZooKeeper), which all threads share.

    Returns the source even if it has no topology or does not answer.
    """
    return _active.source()


def topology_status() -> TopologyStatus:
    """Return which topology version this process uses and, if it has refused a newer one, why.

    :raises TopologyUnavailable: there is no topology.
    """
    return _active.status()


def document() -> Document:
    """Return the topology that this process uses, as a :class:`Document`.

    A document is the form in which a topology is published. If the source is static, the document
    is made from the settings.

    :raises TopologyUnavailable: there is no topology.
    """
    return _active.document()


def check_document(new: Document) -> conf.Config:
    """Return the configuration that this process would have with the topology document ``new``.

    The configuration in use does not change.

    :raises InvalidTopology: ``new`` is not valid together with the ``SHARDED_ORM`` setting, or must not
        replace the document in use. The error lists every problem.
    """
    return _active.check(new)


def refresh(at_least: int = 0) -> None:
    """Load the topology document from its source and use it from now on.

    Costs a round trip to the source. Does nothing if the topology is static (in the settings).

    :param at_least: skip the round trip if this version or a later one is in use already. With 0,
        always load.
    :raises TopologyError: the source does not answer, or its document is refused.
    """
    _active.refresh(at_least)


def topology() -> Topology:
    """Return the topology in use, which is immutable.

    Call this only once per operation: another thread may replace the topology at any time.
    """
    # Read the variable only once: another thread may change it at any time.
    swapped = _topology
    return config().topology if swapped is None else swapped


def swap(new: Topology | None) -> None:
    """Use the topology ``new`` (a map of shards to nodes) from now on.

    Called only by test runs, and by operators' processes that work on one server of a pair.

    A running statement or transaction finishes on the old node; the next one uses the shard's node
    in ``new``. New routing strategies are created, which remember no shards of keys.

    :param new: the topology to use; None restores the configured topology.
    """
    global _topology
    with _active.lock:
        _topology = new
        _strategies.clear()
        _former.clear()
        relocation.topology_changed()


def group(name: str) -> ShardGroup:
    """Return the shard group with the name ``name``.

    :raises UnknownShard: there is no such group.
    """
    groups = topology().groups
    try:
        return groups[name]
    except KeyError:
        raise UnknownShard(
            f"There is no shard group {name!r}; SHARDED_ORM['GROUPS'] has {sorted(groups)!r}."
        ) from None


def strategy(name: str) -> Strategy:
    """Return the routing strategy of shard group ``name``, an object that finds the shard of a key.

    The strategy is created at its first use and shared by all threads.

    :raises UnknownShard: there is no such group.
    """
    strategy = _strategies.get(name)
    if strategy is None:
        with _active.lock:
            strategy = _strategies.get(name)
            if strategy is None:
                strategy = make_strategy(group(name))
                strategy.node_failure = _node_failure
                if isinstance(strategy, DirectoryStrategy):
                    strategy.store = _directory_store(config().directory)
                    strategy.lease = placement_lease()
                former = _former.pop(name, None)
                if former is not None:
                    strategy.succeed(former)
                _strategies[name] = strategy
    return strategy


def placement_lease() -> PlacementLease | PermanentLease:
    """Return the lease: the permission, for a limited time, to remember the shards of keys.

    Thread-safe.
    """
    global _placement_lease
    with _active.lock:
        if _placement_lease is None:
            options = config()
            if options.placement_lease is None:
                _placement_lease = PermanentLease()
            else:
                store = _directory_store(options.directory)
                _placement_lease = PlacementLease(store, options.placement_lease)
        return _placement_lease


def _node_failure(shard: Shard) -> Exception | None:
    """Return the last error of the node of ``shard``, if this process could not open a session
    there.

    Return None if the last attempt to open a session succeeded, or if there was no attempt.
    """
    # Return early if every node answers, because it takes time to create the shard's connection
    # object.
    if pool.all_nodes_answer():
        return None
    connection: Any = connections[shard.alias]
    failure: Exception | None = connection.node_failure()
    return failure


def tickets() -> TicketGenerator:
    """Return the generator of ticket ids (Flickr, F1-F3). Thread-safe."""
    global _tickets
    generator = _tickets
    if generator is None:
        with _active.lock:
            generator = _tickets
            if generator is None:
                from sharded_orm.ids.tickets.generator import TicketGenerator

                generator = _tickets = TicketGenerator(config().tickets, config().ticket_options)
    return generator


def cache() -> CacheClient | None:
    """Return the client of the cache servers (Yupoo, Y13-Y16).

    None if the setting has no ``CACHE``. Thread-safe; costs no round trip.

    :raises ImproperlyConfigured: ``CACHE`` names an alias of ``CACHES`` that cannot be used.
    """
    global _cache
    client = _cache
    if client is None:
        options = config().cache
        if options is None:
            return None
        with _active.lock:
            client = _cache
            if client is None:
                from sharded_orm.cache.client import CacheClient

                if _cache_prefix is not None:
                    options = replace(options, prefix=_cache_prefix)
                client = CacheClient(options)
                if _cache_prefix is not None:
                    # This is a test run. Do not let the cache client send its counts to the cache
                    # servers every few seconds, because tests count round trips.
                    client.statistics.interval = None
                _cache = client
    return client


def used_cache() -> CacheClient | None:
    """Return the client of the cache servers if :func:`cache` has created it; otherwise None."""
    return _cache


def swap_cache_prefix(prefix: str | None) -> None:
    """Use ``prefix`` for all names in the cache from now on; None restores the configured prefix.

    Test runs use this, so they do not read entries of another test run or of the live site.
    """
    global _cache_prefix
    with _active.lock:
        _cache_prefix = prefix
    reset_cache()


def reset_cache() -> None:
    """Drop the cache client, because a setting such as ``CACHES`` has changed.

    The next use of the cache creates a new client. This function also calls the functions that
    :func:`on_reset` has registered.
    """
    global _cache
    with _active.lock:
        client, _cache = _cache, None
        forgetters = tuple(_forgetters)
    if client is not None:
        client.statistics.flush()
        client.close()
    for forgetter in forgetters:
        forgetter()


_forgetters: list[Callable[[], None]] = []


def on_reset(forget: Callable[[], None]) -> None:
    """Register the function ``forget``, which drops values derived from the settings.
    :func:`reset_cache` calls it.
    """
    _forgetters.append(forget)


def reset() -> None:
    """Drop all objects that were made from the settings, because the settings have changed.

    A topology that :func:`swap` has set stays in use: in a test run, that topology keeps the test
    shards apart from the real ones.
    """
    global _tickets, _placement_lease
    with _active.lock:
        _placement_lease = None
        used, stop_source = _active.reset()
        names = set(used.topology.groups) if used is not None else set()
        generator, _tickets = _tickets, None
        _strategies.clear()
        _former.clear()
        relocation.topology_changed()
    # Stop the source without holding the lock: stop_source() waits for the source's thread, which may
    # itself be waiting for the lock.
    stop_source()
    if generator is not None:
        generator.close()
    reset_cache()
    if isinstance(settings.DATABASES, ShardedDatabases) and _topology is None:
        settings.DATABASES._groups_changed(names)


def shard(name: str, number: int) -> Shard:
    """Return the shard with the number ``number`` in the shard group ``name``.

    :raises UnknownShard: there is no such group or shard.
    """
    return shard_in(group(name), number)


def shard_in(group: ShardGroup, number: int) -> Shard:
    """Return the shard of ``group`` with the number ``number``.

    :raises UnknownShard: there is no such shard.
    """
    try:
        return group.shard(number)
    except LookupError as exc:
        raise _unknown_shard(exc) from exc


def shards_in(group: ShardGroup, numbers: Iterable[int]) -> list[Shard]:
    """Return the shards of ``group`` with these ``numbers``, in the order of ``numbers``.

    :raises UnknownShard: one of them does not exist.
    """
    try:
        return [group.shard(number) for number in numbers]
    except LookupError as exc:
        raise _unknown_shard(exc) from exc


def _unknown_shard(error: LookupError) -> UnknownShard:
    return UnknownShard(
        f"{error.args[0]} If a key was placed on it, this process uses an older topology"
        f" (version {topology().version}) than the one that placed it: 'manage.py topology show'"
        " tells what keeps it back; with a static source, restart it."
    )


def locate(name: str, key: Any) -> Shard | None:
    """Return the shard of ``key`` in the shard group ``name``.

    Return None if the key has no shard. Then it has no rows: no row was written yet, or a row can
    never have this key. See :meth:`Strategy.locate`.
    """
    return located(name, strategy(name), key)


def located(name: str, strategy: Strategy, key: Any) -> Shard | None:
    """Return the same as :func:`locate`, for a caller that has the strategy already.

    :param strategy: the routing strategy of the group ``name``, which :func:`strategy` has
        returned.
    """
    number = strategy.locate(key)
    return None if number is None else shard(name, number)


def place(name: str, key: Any) -> Shard:
    """Return the shard of ``key`` in the shard group ``name``. Choose a shard if the key has none.

    See :meth:`Strategy.place`.
    """
    return shard(name, strategy(name).place(key))
