"""A mapping for ``DATABASES`` that has an alias for every shard, without storing these aliases.

Django iterates over all keys of ``DATABASES`` several times per request, so thousands of stored
aliases would cost milliseconds in each request. This mapping stores only the aliases of the
settings and one alias per shard group. The settings of a shard's alias are created at each look-up.
"""

from __future__ import annotations

import threading
from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from contextlib import suppress
from typing import Any, Protocol

from sharded_orm.exceptions import InvalidConfiguration, TopologyUnavailable

GROUP_ENGINE = "sharded_orm.backends.group"

# The default values that Django's ConnectionHandler.configure_settings() sets for all aliases that
# are stored in DATABASES. The settings of a shard's alias are not stored, but created at each
# look-up, so this module adds the defaults.
_DEFAULTS: Mapping[str, Any] = {
    "ATOMIC_REQUESTS": False,
    "AUTOCOMMIT": True,
    "CONN_MAX_AGE": 0,
    "CONN_HEALTH_CHECKS": False,
    "TIME_ZONE": None,
    "NAME": "",
    "USER": "",
    "PASSWORD": "",
    "HOST": "",
    "PORT": "",
}
_TEST_DEFAULTS: Mapping[str, Any] = {
    "CHARSET": None, "COLLATION": None, "MIGRATE": True, "MIRROR": None, "NAME": None,
}  # fmt: skip


class Resolver(Protocol):
    """The interface of the object by which this module looks up groups and shards.

    Its methods must be thread-safe.
    """

    def group_aliases(self) -> dict[str, dict[str, Any]]:
        """Return a dict that maps each group's name, which is its alias, to the database settings.

        :raises TopologyUnavailable: the process has no topology.
        """

    def shard_alias(self, alias: str) -> dict[str, Any] | None:
        """Return the database settings of the shard with this alias; None if there is none."""

    def is_shard(self, alias: str) -> bool:
        """Whether ``alias`` is the alias of a shard. Cheaper than :meth:`shard_alias`."""


# The object that looks up groups and shards. It is set once, when the module ``apps`` is loaded.
# This is after the settings module has created DATABASES, and before models are loaded. So code in
# the modules of models can use the aliases of groups and shards.
_resolver: Resolver | None = None


def provide_resolver(resolver: Resolver) -> None:
    """Set the object that :class:`ShardedDatabases` asks for groups and shards."""
    global _resolver
    _resolver = resolver


# The lock that is held while the aliases of groups are added to DATABASES, because two threads may
# try to add them at the same time.
_adding = threading.RLock()


def complete(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the database settings ``settings``, with Django's defaults for missing keys."""
    full = {**_DEFAULTS, **settings}
    full["OPTIONS"] = dict(full.get("OPTIONS") or {})
    full["TEST"] = {**_TEST_DEFAULTS, **(full.get("TEST") or {})}
    return full


class ShardedDatabases(dict[str, dict[str, Any]]):
    """A mapping for ``DATABASES`` with an alias for every shard; see :func:`sharded_databases`.

    Iteration yields the aliases in the settings and one alias per group. It yields no aliases of
    shards, except those that :meth:`expose` has added. So the cost of iteration does not depend on
    the number of shards. ``in``, ``[]`` and ``get`` accept the aliases of all shards. Each look-up
    of a shard creates a new dict, so memory does not grow with the number of shards used.
    """

    _groups_added = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The aliases of shards that expose() has added, because they were given on the command line
        # (``--database``). Iteration yields these aliases, too.
        self._exposed: list[str] = []

    def _with_groups(self) -> ShardedDatabases:
        # Add the aliases of groups when the mapping is first used, and not when it is created:
        # SHARDED_ORM may come after DATABASES in the settings module. At the first use, the
        # settings are complete.
        if not self._groups_added:
            # If the configuration is wrong, continue without aliases of groups, because Django may be
            # loading models now. Later, the ready() of this package's AppConfig raises the error, or
            # lets the process run without a topology.
            with suppress(InvalidConfiguration, TopologyUnavailable):
                self.add_groups()
        return self

    def add_groups(self) -> None:
        """Add the aliases of groups, if they were not added before.

        :raises InvalidConfiguration: the configuration is wrong, or a group has the name of another
            entry.
        :raises TopologyUnavailable: the process has no topology.
        """
        with _adding:
            # _resolver is None until Django loads the applications. Groups cannot be looked up
            # before.
            if not self._groups_added and _resolver is not None:
                self._add(_resolver.group_aliases())

    def _add(self, groups: Mapping[str, dict[str, Any]]) -> None:
        taken = [name for name in groups if super(ShardedDatabases, self).__contains__(name)]
        if taken:
            raise InvalidConfiguration(
                f"group {name!r} has the name of an entry of DATABASES; rename one"
                for name in taken
            )
        self.update({name: complete(settings) for name, settings in groups.items()})
        self._groups_added = True

    def renew_groups(self) -> None:
        """Update the stored settings of aliases from the current topology.

        Settings are stored for groups, and for the shards that :meth:`expose` has added. Call this
        method after a change of the topology, because groups and shards may then be on other nodes.
        """
        if _resolver is None:
            return
        renewed = dict(_resolver.group_aliases()) if self._groups_added else {}
        for alias in self._exposed:
            if settings := _resolver.shard_alias(alias):
                renewed[alias] = settings
        # Call complete() for all settings before the update, so that an exception leaves all
        # settings unchanged.
        self.update({alias: complete(settings) for alias, settings in renewed.items()})

    def _groups_changed(self, names: set[str]) -> None:
        """Remove the aliases of the groups ``names`` after a change of the setting ``SHARDED_ORM``.

        The next use of the mapping adds the aliases of the groups in the new setting.
        """
        for name in names:
            if super().__contains__(name) and super().__getitem__(name)["ENGINE"] == GROUP_ENGINE:
                del self[name]
        self._groups_added = False

    def expose(self, arguments: Sequence[str]) -> None:
        """Make iteration over this mapping also yield the shards that follow ``--database`` in
        ``arguments``.

        Django's option ``--database`` refuses an alias that iteration does not yield.

        :param arguments: the arguments of the command line, such as ``sys.argv[1:]``.
        """
        for position, argument in enumerate(arguments):
            option, _, alias = argument.partition("=")
            if option == "--database":
                alias = alias or "".join(arguments[position + 1 : position + 2])
                settings = self._shard_alias(alias)
                if settings is not None:
                    self._exposed.append(alias)
                    self[alias] = complete(settings)

    @staticmethod
    def _shard_alias(alias: object) -> dict[str, Any] | None:
        if _resolver is None or not isinstance(alias, str):
            return None
        return _resolver.shard_alias(alias)

    def __missing__(self, alias: str) -> dict[str, Any]:
        self._with_groups()
        if super().__contains__(alias):
            return super().__getitem__(alias)
        settings = self._shard_alias(alias)
        if settings is None:
            raise KeyError(alias)
        return complete(settings)

    def __contains__(self, alias: object) -> bool:
        if super().__contains__(alias):
            return True
        self._with_groups()
        return super().__contains__(alias) or (
            _resolver is not None and isinstance(alias, str) and _resolver.is_shard(alias)
        )

    def get(self, alias: str, default: Any = None) -> Any:
        try:
            return self[alias]
        except KeyError:
            return default

    def __iter__(self) -> Iterator[str]:
        # Iterate over a copy, because another thread may add a group at the same time.
        return iter(list(super(ShardedDatabases, self._with_groups()).keys()))

    def __len__(self) -> int:
        return super(ShardedDatabases, self._with_groups()).__len__()

    def keys(self) -> KeysView[str]:  # type: ignore[override]  # dict's method returns a final class
        return super(ShardedDatabases, self._with_groups()).keys()

    def values(self) -> ValuesView[dict[str, Any]]:  # type: ignore[override]  # dict's method returns a final class
        return super(ShardedDatabases, self._with_groups()).values()

    def items(self) -> ItemsView[str, dict[str, Any]]:  # type: ignore[override]  # dict's method returns a final class
        return super(ShardedDatabases, self._with_groups()).items()


def sharded_databases(databases: Mapping[str, dict[str, Any]]) -> ShardedDatabases:
    """Return the value for the setting ``DATABASES``: ``databases``, and an alias for every shard.

    ::

        DATABASES = sharded_databases({"default": {...}})

    :param databases: the databases that are not shards, including ``default``.
    """
    return ShardedDatabases(databases)
