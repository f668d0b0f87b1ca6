"""Settings made into live objects; the only assembler.

Everything else asks here for the topology, a group's strategy or the ticket
generator. The objects are made at first use, are shared by all threads, and are
dropped whole by :func:`reset` (Django's ``setting_changed``; tests).
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


def _changed() -> None:
    """The source has another topology, which is in use by now. The lock is held."""
    _renew_strategies()
    try:
        if _topology is None and isinstance(settings.DATABASES, ShardedDatabases):
            settings.DATABASES.renew_groups()
    finally:
        # Also if the change is taken back: who has looked by then must look once more.
        relocation.topology_changed()


def _renew_strategies() -> None:
    global _strategies, _former
    _former, _strategies = {**_former, **_strategies}, {}


_configured = ActiveConfig(_changed)


def _forked() -> None:
    if _configured.forked():
        # Another thread of the parent may have been about to do so. And whoever has a connection
        # object of the parent's has to ask here once, or the child would never follow.
        _renew_strategies()
        relocation.topology_changed()


os.register_at_fork(after_in_child=_forked)


@atexit.register
def _end() -> None:
    if _cache is not None:
        _cache.statistics.flush()
    _configured.end()


_topology: Topology | None = None
_strategies: dict[str, Strategy] = {}
# Of the topology before this one: what they remember of keys goes on.
_former: dict[str, Strategy] = {}
_tickets: TicketGenerator | None = None
_cache: CacheClient | None = None
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
    """The checked ``SHARDED_ORM`` setting, with the topology of its source.

    At its first use the source is asked; from then on it is followed in the background.

    :raises InvalidConfiguration: the setting is wrong.
    :raises TopologyUnavailable: the source has no topology to give, nor has the disk.
    """
    found = _configured.current  # Read once: another thread may reset() it at any time.
    return _configured.load() if found is None else found


def source() -> TopologySource:
    """The source of the topology; also while it has none to give. Shared by all threads."""
    return _configured.source()


def standing() -> TopologyStatus:
    """Which topology this process uses, and what it has refused.

    :raises TopologyUnavailable: it has none.
    """
    return _configured.standing()


def document() -> Document:
    """What this process uses, as a document; of a static source, the settings.

    :raises TopologyUnavailable: it has none.
    """
    return _configured.document()


def check_document(new: Document) -> conf.Config:
    """What ``new`` makes of the setting, if it may follow what this process uses.

    :raises InvalidTopology: it may not; lists everything that is wrong.
    """
    return _configured.check(new)


def refresh(at_least: int = 0) -> None:
    """Use what the source holds now, unless ``at_least`` that version is in use already.

    Costs a round trip to the source.

    :raises TopologyError: the source does not answer, or what it holds is refused.
    """
    _configured.refresh(at_least)


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

    A statement that runs finishes where it is, and so does a transaction; the next one goes
    where the new snapshot says. Strategies are made anew, and remember nothing.
    """
    global _topology
    with _configured.lock:
        _topology = new
        _strategies.clear()
        _former.clear()
        relocation.topology_changed()


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
        with _configured.lock:
            found = _strategies.get(name)
            if found is None:
                found = make_strategy(group(name))
                if isinstance(found, DirectoryStrategy):
                    found.store = _directory_store(config().directory)
                former = _former.pop(name, None)
                if former is not None:
                    found.succeed(former)
                _strategies[name] = found
    return found


def tickets() -> TicketGenerator:
    """The generator of ticket ids (Flickr, F1-F3). Thread-safe."""
    global _tickets
    found = _tickets
    if found is None:
        with _configured.lock:
            found = _tickets
            if found is None:
                from sharded_orm.ids.tickets.generator import TicketGenerator

                found = _tickets = TicketGenerator(config().tickets, config().ticket_options)
    return found


def cache() -> CacheClient | None:
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
        with _configured.lock:
            found = _cache
            if found is None:
                from sharded_orm.cache.client import CacheClient

                if _cache_prefix is not None:
                    options = replace(options, prefix=_cache_prefix)
                made = CacheClient(options)
                if _cache_prefix is not None:
                    # A test that counts round trips has no use for one that comes by the clock.
                    made.statistics.interval = None
                found = _cache = made
    return found


def made_cache() -> CacheClient | None:
    """What :func:`cache` gives, if it was ever used."""
    return _cache


def swap_cache_prefix(prefix: str | None) -> None:
    """Use other names in the cache from now on; None goes back to the configured ones.

    So that a test run meets no entry of another one, or of the site.
    """
    global _cache_prefix
    with _configured.lock:
        _cache_prefix = prefix
    reset_cache()


def reset_cache() -> None:
    """Make the cache anew at its next use: ``CACHES`` or the routers have changed."""
    global _cache
    with _configured.lock:
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


def alias_settings(alias: str) -> dict[str, Any] | None:
    """What ``DATABASES`` would hold for ``alias``; None when it names no shard."""
    current = topology()
    found = current.resolve(alias)
    return None if found is None else database_settings(found, current)


def database_settings(shard: Shard, among: Topology | None = None) -> dict[str, Any]:
    """What ``DATABASES`` would hold for ``shard``.

    :param among: the snapshot that it is from, if that may have been swapped since.
    """
    # Before the topology: a swap in between then only leads to one more look-up.
    generation = relocation.generation
    node = _application_settings((among or topology()).nodes[shard.node])
    name = shard.schema
    if node.get("NAME"):  # SQLite: the node is a folder
        name = str(Path(node["NAME"]) / f"{shard.schema}.sqlite3")
    return {**node, "NAME": name, "SHARD": shard, "GENERATION": generation}


def settings_as_planned(shard: Shard) -> dict[str, Any] | None:
    """Of a connection to ``shard`` at its node, though it may be on another one by now.

    None if there is no such node any more.
    """
    current = topology()
    return complete(database_settings(shard, current)) if shard.node in current.nodes else None


def _application_settings(node: Mapping[str, Any]) -> dict[str, Any]:
    """Without the account of operators, which nothing else may use or show."""
    return {key: value for key, value in node.items() if key != "OPERATOR"}


def operator_settings(node: str) -> dict[str, Any] | None:
    """The settings of ``node`` with its operators' account; None where it has none."""
    found = topology().nodes[node]
    account = found.get("OPERATOR")
    return {**_application_settings(found), **account} if account else None


def group_settings(group: ShardGroup, among: Topology | None = None) -> dict[str, Any]:
    """What ``DATABASES`` holds for the alias that stands for the whole of ``group``.

    :param among: as of :func:`database_settings`.
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
    """Forget everything that was made from the settings; they have changed.

    A snapshot that was swapped in stays: in a test run it is what keeps the shards of
    the test apart from the real ones.
    """
    global _tickets
    with _configured.lock:
        used, stop_source = _configured.reset()
        names = set(used.topology.groups) if used is not None else set()
        generator, _tickets = _tickets, None
        _strategies.clear()
        _former.clear()
        relocation.topology_changed()
    # Not with the lock, which the source's thread may be waiting for.
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
    """The shard of ``key`` in group ``name``; None if no row can have it. See :meth:`Strategy.locate`."""
    number = strategy(name).locate(key)
    return None if number is None else shard(name, number)


def place(name: str, key: Any) -> Shard:
    """The shard of ``key``, which is given one if it has none. See :meth:`Strategy.place`."""
    return shard(name, strategy(name).place(key))


class _CurrentAliases:
    """The aliases of the snapshot that is in use, for ``DATABASES``."""

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
