"""Settings made into live objects; the only assembler.

Everything else asks here for the topology, a group's strategy or the ticket
generator. The objects are made at first use, are shared by all threads, and are
dropped whole by :func:`reset` (Django's ``setting_changed``; tests).
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from sharded_orm import conf
from sharded_orm.exceptions import InvalidConfiguration, UnknownShard
from sharded_orm.routing.base import Strategy, make_strategy
from sharded_orm.routing.directory import DirectoryStore, DirectoryStrategy
from sharded_orm.topology.aliases import GROUP_ENGINE, ShardedDatabases
from sharded_orm.topology.model import Shard, ShardGroup, Topology

if TYPE_CHECKING:
    from sharded_orm.cache.service import Cache
    from sharded_orm.ids.tickets.generator import TicketGenerator

_lock = threading.RLock()


def _renew_lock() -> None:
    # In a child: another thread of its parent may have held it.
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


@atexit.register
def _count_at_exit() -> None:
    if _cache is not None:
        _cache.statistics.flush()


_config: conf.Config | None = None
_topology: Topology | None = None
_strategies: dict[str, Strategy] = {}
_tickets: TicketGenerator | None = None
_cache: Cache | None = None
# In place of the configured prefix, while tests run.
_cache_prefix: str | None = None


def _no_directory(alias: str) -> DirectoryStore:
    raise ImproperlyConfigured(
        "The directory strategy needs its table: add 'sharded_orm' to INSTALLED_APPS."
    )


_directory_store: Callable[[str], DirectoryStore] = _no_directory


def provide_directory(factory: Callable[[str], DirectoryStore]) -> None:
    """Tell how to open the directory on an alias. The app does so when it is ready."""
    global _directory_store
    _directory_store = factory


def config() -> conf.Config:
    """The checked ``SHARDED_ORM`` setting. Raises :exc:`InvalidConfiguration`."""
    global _config
    found = _config  # Read once: another thread may reset() it at any time.
    if found is None:
        with _lock:
            found = _config
            if found is None:
                found = _config = conf.load()
    return found


def topology() -> Topology:
    """The current snapshot. Take it once per operation; it may be swapped any time."""
    swapped = _topology  # Read once, as in config().
    return config().topology if swapped is None else swapped


def validate() -> None:
    """Check the setting as a whole, strategies included; one error that lists all that is wrong."""
    found: list[str] = []
    for name in topology().groups:
        try:
            strategy(name)
        except InvalidConfiguration as exc:
            found += exc.problems
    for key, aliases in (("TICKETS", config().tickets), ("DIRECTORY", (config().directory,))):
        found += [
            f"{key} names {alias!r}, which is no alias of DATABASES"
            for alias in aliases
            if (topology().groups or key == "TICKETS")
            and not dict.__contains__(settings.DATABASES, alias)
        ]
    if topology().groups and not isinstance(settings.DATABASES, ShardedDatabases):
        found.append(
            "DATABASES must be wrapped: DATABASES = sharded_databases({...})"
            " (from sharded_orm.topology.aliases)"
        )
    elif topology().groups:
        try:
            settings.DATABASES.keys()  # Adds the groups' aliases, before there are threads.
        except InvalidConfiguration as exc:
            found += exc.problems
    if found:
        raise InvalidConfiguration(found)


def swap(new: Topology | None) -> None:
    """Use another snapshot from now on; None goes back to the configured one.

    Statements that run keep what they have; strategies are made anew.
    """
    global _topology
    with _lock:
        _topology = new
        _strategies.clear()


def group(name: str) -> ShardGroup:
    """The group ``name``. Raises :exc:`UnknownShard`."""
    groups = topology().groups
    try:
        return groups[name]
    except KeyError:
        raise UnknownShard(
            f"There is no shard group {name!r}; SHARDED_ORM['GROUPS'] has {sorted(groups)!r}."
        ) from None


def strategy(name: str) -> Strategy:
    """The routing strategy of group ``name``. Thread-safe; made at first use."""
    found = _strategies.get(name)
    if found is None:
        with _lock:
            found = _strategies.get(name)
            if found is None:
                found = make_strategy(group(name))
                if isinstance(found, DirectoryStrategy):
                    found.store = _directory_store(config().directory)
                _strategies[name] = found
    return found


def tickets() -> TicketGenerator:
    """The generator of ticket ids (Flickr, F1-F3). Thread-safe."""
    global _tickets
    found = _tickets
    if found is None:
        with _lock:
            found = _tickets
            if found is None:
                from sharded_orm.ids.tickets.generator import TicketGenerator

                found = _tickets = TicketGenerator(config().tickets, config().ticket_options)
    return found


def cache() -> Cache | None:
    """The cache servers (Yupoo, Y13-Y16); None while there is no ``CACHE``. Thread-safe.

    Asks no server.

    :raises ImproperlyConfigured: it names an alias of ``CACHES`` that cannot be used.
    """
    global _cache
    found = _cache
    if found is None:
        options = config().cache
        if options is None:
            return None
        with _lock:
            found = _cache
            if found is None:
                from sharded_orm.cache.service import Cache

                if _cache_prefix is not None:
                    options = replace(options, prefix=_cache_prefix)
                made = Cache(options)
                if _cache_prefix is not None:
                    # A test that counts round trips has no use for one that comes by the clock.
                    made.statistics.interval = None
                found = _cache = made
    return found


def made_cache() -> Cache | None:
    """What :func:`cache` gives, if it was ever used."""
    return _cache


def swap_cache_prefix(prefix: str | None) -> None:
    """Use other names in the cache from now on; None goes back to the configured ones.

    So that a test run meets no entry of another one, or of the site.
    """
    global _cache_prefix
    with _lock:
        _cache_prefix = prefix
    reset_cache()


def reset_cache() -> None:
    """Make the cache anew at its next use: ``CACHES`` or the routers have changed."""
    global _cache
    with _lock:
        found, _cache = _cache, None
        forgetters = tuple(_forgetters)
    if found is not None:
        found.statistics.flush()
        found.close()
    for forgetter in forgetters:
        forgetter()


_forgetters: list[Callable[[], None]] = []


def on_reset(forget: Callable[[], None]) -> None:
    """Call ``forget`` whenever what was derived from :func:`cache` is void."""
    _forgetters.append(forget)


TEMPLATE_SUFFIX = "_template"


def template_group(alias: str) -> str | None:
    """The group whose template schema ``alias`` names (``photos_template``), or None.

    A template holds the tables of a group and no rows of users; test shards are
    cloned from it.
    """
    name = alias.removesuffix(TEMPLATE_SUFFIX)
    return name if name != alias and name in topology().groups else None


def database_settings(shard: Shard) -> dict[str, Any]:
    """What ``DATABASES`` would hold for ``shard``."""
    node = topology().nodes[shard.node]
    name = shard.schema
    if node.get("NAME"):  # SQLite: the node is a folder
        name = str(Path(node["NAME"]) / f"{shard.schema}.sqlite3")
    return {**node, "NAME": name, "SHARD": shard}


def group_settings(group: ShardGroup) -> dict[str, Any]:
    """What ``DATABASES`` holds for the alias that stands for the whole of ``group``."""
    node = topology().nodes[group.ranges[0].primary]
    return {
        **node,
        "ENGINE": GROUP_ENGINE,
        "NODE_ENGINE": node["ENGINE"],
        "NAME": group.name,
        "GROUP": group.name,
        "ATOMIC_REQUESTS": group.atomic_requests,
        "MAX_IDLE_ALIASES": config().max_idle_aliases,
    }


def reset() -> None:
    """Forget everything that was made from the settings; they have changed.

    A snapshot that was swapped in stays: in a test run it is what keeps the shards of
    the test apart from the real ones.
    """
    global _config, _tickets
    with _lock:
        names = set(_config.topology.groups) if _config is not None else set()
        generator, _config, _tickets = _tickets, None, None
        _strategies.clear()
    if generator is not None:
        generator.close()
    reset_cache()
    if isinstance(settings.DATABASES, ShardedDatabases) and _topology is None:
        settings.DATABASES._groups_changed(names)


def shard(name: str, number: int) -> Shard:
    """Shard ``number`` of group ``name``. Raises :exc:`UnknownShard`."""
    try:
        return group(name).shard(number)
    except LookupError as exc:
        raise UnknownShard(
            f"{exc.args[0]} If a key was placed on it, this process has older settings than the"
            " one that placed it: restart it with the current SHARDED_ORM."
        ) from exc


def locate(name: str, key: Any) -> Shard | None:
    """The shard of ``key`` in group ``name``; None while it has none. Never writes."""
    number = strategy(name).locate(key)
    return None if number is None else shard(name, number)


def place(name: str, key: Any) -> Shard:
    """The shard of ``key``, which is given one if it has none. See :meth:`Strategy.place`."""
    return shard(name, strategy(name).place(key))
