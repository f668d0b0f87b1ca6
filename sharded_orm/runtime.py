"""The live objects that the settings describe: topology, strategies, ticket generator, cache.

This is the only module that assembles them. They are made at first use, are shared by all
threads, and are all dropped by :func:`reset` (Django's ``setting_changed``).
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from sharded_orm import conf
from sharded_orm.active_config import ActiveConfig
from sharded_orm.backends.group import relocation
from sharded_orm.exceptions import InvalidConfiguration, UnknownShard
from sharded_orm.routing.base import Strategy, make_strategy
from sharded_orm.routing.directory import DirectoryStore, DirectoryStrategy
from sharded_orm.topology.aliases import (
    GROUP_ENGINE,
    ShardedDatabases,
    complete,
    provide_resolver,
)
from sharded_orm.topology.document import Document
from sharded_orm.topology.model import Shard, ShardGroup, Topology
from sharded_orm.topology.sources.base import TopologySource
from sharded_orm.topology.watcher import TopologyStatus

if TYPE_CHECKING:
    from sharded_orm.cache.client import CacheClient
    from sharded_orm.ids.tickets.generator import TicketGenerator


def _topology_changed() -> None:
    """The topology in use has been replaced by another of its source. The lock is held."""
    _renew_strategies()
    try:
        if _topology is None and isinstance(settings.DATABASES, ShardedDatabases):
            settings.DATABASES.renew_groups()
    finally:
        # Even if the change is undone: connections that have looked meanwhile must look again.
        relocation.topology_changed()


def _renew_strategies() -> None:
    global _strategies, _former
    _former, _strategies = {**_former, **_strategies}, {}


_active = ActiveConfig(_topology_changed)


def _after_fork() -> None:
    if _active.after_fork():
        # A thread of the parent may have been about to do this. And connection objects of the
        # parent must ask here once: only that makes the child watch its source.
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
# Strategies of the previous topology, by group: their successors take over what they remember.
_former: dict[str, Strategy] = {}
_tickets: TicketGenerator | None = None
_cache: CacheClient | None = None
# Replaces the configured prefix; see swap_cache_prefix().
_cache_prefix: str | None = None


def _no_directory(alias: str) -> DirectoryStore:
    raise ImproperlyConfigured(
        "The directory strategy needs its table: add 'sharded_orm' to INSTALLED_APPS."
    )


_directory_store: Callable[[str], DirectoryStore] = _no_directory


def provide_directory(factory: Callable[[str], DirectoryStore]) -> None:
    """Open the directory on an alias with ``factory`` from now on. The app calls this when ready."""
    global _directory_store
    _directory_store = factory


def config() -> conf.Config:
    """The checked ``SHARDED_ORM`` setting, with the topology of its source.

    The first call asks the source, which is watched in the background from then on.

    :raises InvalidConfiguration: the setting is wrong.
    :raises TopologyUnavailable: neither the source nor the last good copy has a topology.
    """
    current = _active.current  # Read once: another thread may reset() it at any time.
    return _active.load() if current is None else current


def source() -> TopologySource:
    """The source of the topology, even if it has none to give. Shared by all threads."""
    return _active.source()


def topology_status() -> TopologyStatus:
    """Which topology this process uses, and which document it has refused.

    :raises TopologyUnavailable: there is no topology.
    """
    return _active.status()


def document() -> Document:
    """The topology that this process uses, as a document; with a static source, the settings.

    :raises TopologyUnavailable: there is no topology.
    """
    return _active.document()


def check_document(new: Document) -> conf.Config:
    """The setting with ``new`` laid over it, if ``new`` may follow the document in use.

    :raises InvalidTopology: it may not; lists everything that is wrong.
    """
    return _active.check(new)


def refresh(at_least: int = 0) -> None:
    """Use the document that the source holds now. Costs a round trip to the source.

    :param at_least: do nothing if this version, or a later one, is in use already; 0: never so.
    :raises TopologyError: the source does not answer, or its document is refused.
    """
    _active.refresh(at_least)


def topology() -> Topology:
    """The current topology, an immutable value. Take it once per operation: it may be swapped any time."""
    swapped = _topology  # Read once, as in config().
    return config().topology if swapped is None else swapped


def validate() -> None:
    """Check the setting as a whole, strategies included.

    :raises InvalidConfiguration: one error that lists everything that is wrong.
    """
    problems: list[str] = []
    for name in topology().groups:
        try:
            strategy(name)
        except InvalidConfiguration as exc:
            problems += exc.problems
    for key, aliases in (("TICKETS", config().tickets), ("DIRECTORY", (config().directory,))):
        problems += [
            f"{key} names {alias!r}, which is no alias of DATABASES"
            for alias in aliases
            if (topology().groups or key == "TICKETS")
            and not dict.__contains__(settings.DATABASES, alias)
        ]
    if topology().groups and not isinstance(settings.DATABASES, ShardedDatabases):
        problems.append(
            "DATABASES must be wrapped: DATABASES = sharded_databases({...})"
            " (from sharded_orm.topology.aliases)"
        )
    elif topology().groups:
        try:
            settings.DATABASES.keys()  # Adds the aliases of the groups before threads start.
        except InvalidConfiguration as exc:
            problems += exc.problems
    if problems:
        raise InvalidConfiguration(problems)


def swap(new: Topology | None) -> None:
    """Use another topology from now on; None goes back to the configured one.

    A running statement or transaction finishes where it is; the next one goes where the new
    topology says. Strategies are made anew, and remember nothing.
    """
    global _topology
    with _active.lock:
        _topology = new
        _strategies.clear()
        _former.clear()
        relocation.topology_changed()


def group(name: str) -> ShardGroup:
    """The group ``name``.

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
    """The routing strategy of group ``name``, made at first use. Thread-safe."""
    strategy = _strategies.get(name)
    if strategy is None:
        with _active.lock:
            strategy = _strategies.get(name)
            if strategy is None:
                strategy = make_strategy(group(name))
                if isinstance(strategy, DirectoryStrategy):
                    strategy.store = _directory_store(config().directory)
                former = _former.pop(name, None)
                if former is not None:
                    strategy.succeed(former)
                _strategies[name] = strategy
    return strategy


def tickets() -> TicketGenerator:
    """The generator of ticket ids (Flickr, F1-F3). Thread-safe."""
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
    """The client of the cache servers (Yupoo, Y13-Y16); None without ``CACHE``. Thread-safe.

    Costs no round trip.

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
                    # No round trips by the clock: tests count round trips.
                    client.statistics.interval = None
                _cache = client
    return client


def used_cache() -> CacheClient | None:
    """The client of :func:`cache`; None if it was not used yet."""
    return _cache


def swap_cache_prefix(prefix: str | None) -> None:
    """Use ``prefix`` for names in the cache from now on; None goes back to the configured one.

    Test runs use this, so that they meet no entry of another run or of the site.
    """
    global _cache_prefix
    with _active.lock:
        _cache_prefix = prefix
    reset_cache()


def reset_cache() -> None:
    """Make the client of the cache anew at its next use: ``CACHES`` or the routers have changed."""
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
    """Call ``forget`` whenever values that were derived from :func:`cache` are void."""
    _forgetters.append(forget)


TEMPLATE_SUFFIX = "_template"


def template_group(alias: str) -> str | None:
    """The group whose template ``alias`` names (``photos_template``), or None.

    A template is a schema with the tables of a group and without rows of users; test shards
    are cloned from it.
    """
    name = alias.removesuffix(TEMPLATE_SUFFIX)
    return name if name != alias and name in topology().groups else None


def alias_settings(alias: str) -> dict[str, Any] | None:
    """The settings of the shard ``alias``, as an entry of ``DATABASES``; None if it names no shard."""
    current = topology()
    shard = current.resolve(alias)
    return None if shard is None else database_settings(shard, current)


def database_settings(shard: Shard, among: Topology | None = None) -> dict[str, Any]:
    """The settings of ``shard``, as an entry of ``DATABASES``.

    :param among: the topology that ``shard`` is from, if another may be in use by now.
    """
    # Read before the topology: a swap in between then only leads to one more look-up.
    generation = relocation.generation
    node = _application_settings((among or topology()).nodes[shard.node])
    name = shard.schema
    if node.get("NAME"):  # SQLite: the node is a folder
        name = str(Path(node["NAME"]) / f"{shard.schema}.sqlite3")
    return {**node, "NAME": name, "SHARD": shard, "GENERATION": generation}


def settings_as_planned(shard: Shard) -> dict[str, Any] | None:
    """Complete settings of ``shard`` on its node, even if the shard is on another node by now.

    None if that node does not exist any more.
    """
    current = topology()
    return complete(database_settings(shard, current)) if shard.node in current.nodes else None


def _application_settings(node: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a node without the operators' account, which nothing else may use or show."""
    return {key: value for key, value in node.items() if key != "OPERATOR"}


def operator_settings(node: str) -> dict[str, Any] | None:
    """The settings of ``node`` with its operators' account; None if it has no such account."""
    node_settings = topology().nodes[node]
    account = node_settings.get("OPERATOR")
    return {**_application_settings(node_settings), **account} if account else None


def group_settings(group: ShardGroup, among: Topology | None = None) -> dict[str, Any]:
    """The entry of ``DATABASES`` for the alias that stands for the whole of ``group``.

    :param among: as for :func:`database_settings`.
    """
    generation = relocation.generation
    node = _application_settings((among or topology()).nodes[group.ranges[0].primary])
    return {
        **node,
        "GENERATION": generation,
        "ENGINE": GROUP_ENGINE,
        "NODE_ENGINE": node["ENGINE"],
        "NAME": group.name,
        "GROUP": group.name,
        "ATOMIC_REQUESTS": group.atomic_requests,
        "MAX_IDLE_ALIASES": config().max_idle_aliases,
    }


def reset() -> None:
    """Forget everything that was made from the settings: they have changed.

    A topology that was swapped in stays: in a test run it keeps the test's shards apart from
    the real ones.
    """
    global _tickets
    with _active.lock:
        used, stop_source = _active.reset()
        names = set(used.topology.groups) if used is not None else set()
        generator, _tickets = _tickets, None
        _strategies.clear()
        _former.clear()
        relocation.topology_changed()
    # Without the lock, which the source's thread may be waiting for.
    stop_source()
    if generator is not None:
        generator.close()
    reset_cache()
    if isinstance(settings.DATABASES, ShardedDatabases) and _topology is None:
        settings.DATABASES._groups_changed(names)


def shard(name: str, number: int) -> Shard:
    """Shard ``number`` of group ``name``. Raises :exc:`UnknownShard`."""
    return shard_in(group(name), number)


def shard_in(group: ShardGroup, number: int) -> Shard:
    """Shard ``number`` of ``group``. Raises :exc:`UnknownShard`."""
    try:
        return group.shard(number)
    except LookupError as exc:
        raise UnknownShard(
            f"{exc.args[0]} If a key was placed on it, this process uses an older topology"
            f" (version {topology().version}) than the one that placed it: 'manage.py topology show'"
            " tells what keeps it back; with a static source, restart it."
        ) from exc


def locate(name: str, key: Any) -> Shard | None:
    """The shard of ``key`` in group ``name``; None if no row can have ``key``. See :meth:`Strategy.locate`."""
    number = strategy(name).locate(key)
    return None if number is None else shard(name, number)


def place(name: str, key: Any) -> Shard:
    """The shard of ``key``. A key without a shard is placed on one. See :meth:`Strategy.place`."""
    return shard(name, strategy(name).place(key))


class _CurrentAliases:
    """The aliases of the topology in use, for ``DATABASES``."""

    @staticmethod
    def group_aliases() -> dict[str, dict[str, Any]]:
        current = topology()
        return {name: group_settings(group, current) for name, group in current.groups.items()}

    @staticmethod
    def shard_alias(alias: str) -> dict[str, Any] | None:
        return alias_settings(alias)

    @staticmethod
    def is_shard(alias: str) -> bool:
        return topology().resolve(alias) is not None


provide_resolver(_CurrentAliases())
