"""The objects that the settings describe: topology, strategies, ticket generator, cache client.

Only this module creates them. Each is created at first use and shared by all threads. When a test
changes the settings (Django's ``setting_changed``), :func:`reset` drops all of them.
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
    """Renew strategies and aliases, and notify connections, when the source has brought a new topology.

    The caller holds the lock of ``_active``.
    """
    _renew_strategies()
    try:
        if _topology is None and isinstance(settings.DATABASES, ShardedDatabases):
            settings.DATABASES.renew_groups()
    finally:
        # Also after an error, which undoes the change: connections may have seen the new topology, and
        # must look up their shard's node again.
        relocation.topology_changed()


def _renew_strategies() -> None:
    global _strategies, _former
    _former, _strategies = {**_former, **_strategies}, {}


_active = ActiveConfig(_topology_changed)


def _after_fork() -> None:
    if _active.after_fork():
        # At the fork, a thread of the parent may have been about to renew the strategies. The call of
        # topology_changed() makes copied connection objects ask for the topology again; the first
        # question makes the child follow its source.
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
# The strategies of the previous topology, keyed by group. A new strategy takes over what the previous
# one has in memory, such as the shards of keys.
_former: dict[str, Strategy] = {}
_tickets: TicketGenerator | None = None
_cache: CacheClient | None = None
# The prefix of swap_cache_prefix(), which replaces the configured one; None if it was not called.
_cache_prefix: str | None = None


def _no_directory(alias: str) -> DirectoryStore:
    raise ImproperlyConfigured(
        "The directory strategy needs its table: add 'sharded_orm' to INSTALLED_APPS."
    )


_directory_store: Callable[[str], DirectoryStore] = _no_directory


def provide_directory(factory: Callable[[str], DirectoryStore]) -> None:
    """Set the function that opens the directory, the table that records the shard of each key.

    The app calls this in ``ready()``, because this module cannot import models.

    :param factory: gets the alias of the directory's database.
    """
    global _directory_store
    _directory_store = factory


def config() -> conf.Config:
    """Return the checked ``SHARDED_ORM`` setting, with the topology of its source.

    The first call asks the source. From then on, the source is followed in the background.

    :raises InvalidConfiguration: the setting is wrong.
    :raises TopologyUnavailable: the source does not answer or has no valid topology, and there is no
        local copy of an earlier one (the last good copy).
    """
    # Read the attribute only once: another thread may set it to None at any time by reset().
    current = _active.current
    return _active.load() if current is None else current


def source() -> TopologySource:
    """Return the topology source, which all threads share.

    Works also if the source has no topology or does not answer.
    """
    return _active.source()


def topology_status() -> TopologyStatus:
    """Return which topology version this process uses, and why it has refused a newer one.

    :raises TopologyUnavailable: there is no topology.
    """
    return _active.status()


def document() -> Document:
    """Return the topology that this process uses, as a document.

    With a static source, the document is made from the settings.

    :raises TopologyUnavailable: there is no topology.
    """
    return _active.document()


def check_document(new: Document) -> conf.Config:
    """Return the configuration that this process would have with the topology document ``new``.

    :raises InvalidTopology: the document is not valid together with the setting, or is no permitted
        successor of the one in use. The error lists every problem.
    """
    return _active.check(new)


def refresh(at_least: int = 0) -> None:
    """Load the document from the source and use it from now on. Costs a round trip to the source.

    Does nothing with a static source.

    :param at_least: skip the round trip if this version or a later one is in use already. With 0,
        always load.
    :raises TopologyError: the source does not answer, or its document is refused.
    """
    _active.refresh(at_least)


def topology() -> Topology:
    """Return the topology in use, which is immutable.

    Call this only once per operation: another thread may replace the topology at any time.
    """
    swapped = _topology  # Read the variable only once: another thread may change it.
    return config().topology if swapped is None else swapped


def validate() -> None:
    """Check the whole setting, including the groups' strategies and the aliases of ``DATABASES``.

    :raises InvalidConfiguration: anything is wrong. The error lists every problem.
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
            settings.DATABASES.keys()  # This adds the groups' aliases, before threads are started.
        except InvalidConfiguration as exc:
            problems += exc.problems
    if problems:
        raise InvalidConfiguration(problems)


def swap(new: Topology | None) -> None:
    """Use the topology ``new`` from now on; with None, the configured one again. For test runs.

    A running statement or transaction finishes on its node. The next one goes to the node that the
    new topology names. New strategies are created, without what the previous ones had in memory.
    """
    global _topology
    with _active.lock:
        _topology = new
        _strategies.clear()
        _former.clear()
        relocation.topology_changed()


def group(name: str) -> ShardGroup:
    """Return the shard group ``name``.

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
    """Return the routing strategy of group ``name``, which is created at first use. Thread-safe.

    The strategy finds the shard of a key.
    """
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
                    # In a test run, do not send the counts periodically: tests count round trips.
                    client.statistics.interval = None
                _cache = client
    return client


def used_cache() -> CacheClient | None:
    """Return the client of :func:`cache` if it was created already; otherwise None."""
    return _cache


def swap_cache_prefix(prefix: str | None) -> None:
    """Use ``prefix`` for all names in the cache from now on; with None, the configured one again.

    For test runs, so that they do not read entries of another test run or of the live site.
    """
    global _cache_prefix
    with _active.lock:
        _cache_prefix = prefix
    reset_cache()


def reset_cache() -> None:
    """Drop the cache client, because a setting such as ``CACHES`` has changed.

    The next use creates a new client. Also calls the functions that :func:`on_reset` has registered.
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
    """Register a function that drops values derived from the settings; :func:`reset_cache` calls it."""
    _forgetters.append(forget)


TEMPLATE_SUFFIX = "_template"


def template_group(alias: str) -> str | None:
    """Return the group's name if ``alias`` is that of a template (``photos_template``); else None.

    A template is a schema with the tables of a group, but without users' rows. A test run clones its
    shards from it.
    """
    name = alias.removesuffix(TEMPLATE_SUFFIX)
    return name if name != alias and name in topology().groups else None


def alias_settings(alias: str) -> dict[str, Any] | None:
    """Return the settings of the shard ``alias``, as an entry of ``DATABASES``.

    None if there is no such shard.
    """
    current = topology()
    shard = current.resolve(alias)
    return None if shard is None else database_settings(shard, current)


def database_settings(shard: Shard, among: Topology | None = None) -> dict[str, Any]:
    """Return the settings of ``shard``, as an entry of ``DATABASES``.

    ``GENERATION`` in the result counts the topologies that the process has used: a connection compares
    it to notice a change.

    :param among: the topology that ``shard`` was taken from; by default the one in use.
    """
    # Read this before the topology. If the topology is replaced in between, the connection then looks
    # up its settings once more; in the other order it would miss the change.
    generation = relocation.generation
    node = _application_settings((among or topology()).nodes[shard.node])
    name = shard.schema
    if node.get("NAME"):  # The node is an SQLite node: NAME is the folder of its files.
        name = str(Path(node["NAME"]) / f"{shard.schema}.sqlite3")
    return {**node, "NAME": name, "SHARD": shard, "GENERATION": generation}


def settings_as_planned(shard: Shard) -> dict[str, Any] | None:
    """Return complete settings for the schema of ``shard`` on ``shard.node``.

    They are for that node, even if the topology in use has the shard on another one. None if the node
    does not exist any more.
    """
    current = topology()
    return complete(database_settings(shard, current)) if shard.node in current.nodes else None


def _application_settings(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a node without ``OPERATOR``.

    ``OPERATOR`` is an account for operators' commands only. It must not be used or shown elsewhere.
    """
    return {key: value for key, value in node.items() if key != "OPERATOR"}


def operator_settings(node: str) -> dict[str, Any] | None:
    """Return the settings of ``node`` with the user and password of its ``OPERATOR`` entry.

    None if the node has no such entry.
    """
    node_settings = topology().nodes[node]
    account = node_settings.get("OPERATOR")
    return {**_application_settings(node_settings), **account} if account else None


def group_settings(group: ShardGroup, among: Topology | None = None) -> dict[str, Any]:
    """Return the entry of ``DATABASES`` for the alias that stands for the whole of ``group``.

    :param among: the topology that ``group`` was taken from; by default the one in use.
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
    """Drop all objects that were made from the settings, because the settings have changed.

    A topology that :func:`swap` has set stays in use: in a test run it keeps the test shards apart
    from the real ones.
    """
    global _tickets
    with _active.lock:
        used, stop_source = _active.reset()
        names = set(used.topology.groups) if used is not None else set()
        generator, _tickets = _tickets, None
        _strategies.clear()
        _former.clear()
        relocation.topology_changed()
    # Do not hold the lock here: this waits for the source's thread, which may be waiting for the lock.
    stop_source()
    if generator is not None:
        generator.close()
    reset_cache()
    if isinstance(settings.DATABASES, ShardedDatabases) and _topology is None:
        settings.DATABASES._groups_changed(names)


def shard(name: str, number: int) -> Shard:
    """Return shard ``number`` of group ``name``.

    :raises UnknownShard: there is no such group or shard.
    """
    return shard_in(group(name), number)


def shard_in(group: ShardGroup, number: int) -> Shard:
    """Return shard ``number`` of ``group``.

    :raises UnknownShard: there is no such shard.
    """
    try:
        return group.shard(number)
    except LookupError as exc:
        raise UnknownShard(
            f"{exc.args[0]} If a key was placed on it, this process uses an older topology"
            f" (version {topology().version}) than the one that placed it: 'manage.py topology show'"
            " tells what keeps it back; with a static source, restart it."
        ) from exc


def locate(name: str, key: Any) -> Shard | None:
    """Return the shard of ``key`` in group ``name``; None if no row can have ``key``.

    See :meth:`Strategy.locate`.
    """
    number = strategy(name).locate(key)
    return None if number is None else shard(name, number)


def place(name: str, key: Any) -> Shard:
    """Return the shard of ``key`` in group ``name``. A key without a shard is placed on one.

    See :meth:`Strategy.place`.
    """
    return shard(name, strategy(name).place(key))


class _CurrentAliases:
    """Tells ``DATABASES`` the aliases of groups and shards in the topology in use."""

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
