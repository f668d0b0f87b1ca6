"""``DATABASES`` with shard aliases that are made on demand.

Django iterates all keys of ``DATABASES`` several times per request, so thousands of configured
aliases would cost milliseconds before any work. This mapping *holds* the explicit aliases and one
alias per shard group, and *answers* for every shard.
"""

from __future__ import annotations

import threading
from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from contextlib import suppress
from typing import Any, Protocol

from sharded_orm.exceptions import InvalidConfiguration, TopologyUnavailable

GROUP_ENGINE = "sharded_orm.backends.group"

# django.db.utils.ConnectionHandler.configure_settings sets these on the aliases that it iterates;
# shard aliases are made later and get them here.
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
    """Looks up the aliases of the topology in use. Thread-safe."""

    def group_aliases(self) -> dict[str, dict[str, Any]]:
        """Group -> the settings of its alias.

        :raises TopologyUnavailable: there is no topology.
        """

    def shard_alias(self, alias: str) -> dict[str, Any] | None:
        """The settings of the shard ``alias``; None if there is no such shard."""

    def is_shard(self, alias: str) -> bool:
        """Whether :meth:`shard_alias` has settings for ``alias``, at less cost."""


# Set once, by ``runtime``. The settings module makes DATABASES before that module is loaded; Django
# uses DATABASES when applications are loaded, and by then the resolver is set.
_resolver: Resolver | None = None


def provide_resolver(resolver: Resolver) -> None:
    """Look up groups and shards with ``resolver`` from now on."""
    global _resolver
    _resolver = resolver


# Held while group aliases are added: two threads may make their first requests at once.
_adding = threading.RLock()


def complete(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``settings`` with Django's defaults for an entry of ``DATABASES``."""
    full = {**_DEFAULTS, **settings}
    full["OPTIONS"] = dict(full.get("OPTIONS") or {})
    full["TEST"] = {**_TEST_DEFAULTS, **(full.get("TEST") or {})}
    return full


class ShardedDatabases(dict[str, dict[str, Any]]):
    """``DATABASES`` with every shard; made by :func:`sharded_databases`.

    Iteration yields explicit and group aliases only, so its cost does not depend on the number
    of shards. ``in``, ``[]`` and ``get`` know shard aliases as well. Each look-up of a shard makes
    a new dict, so memory does not grow with the number of shards used.
    """

    _groups_added = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Aliases of the shards that iteration yields.
        self._exposed: list[str] = []

    def _with_groups(self) -> ShardedDatabases:
        # SHARDED_ORM may come after DATABASES in the settings module, so the groups are added at
        # first use, when Django's settings are complete.
        if not self._groups_added:
            with _adding:
                if not self._groups_added:
                    # This runs while models are loaded. The app decides later, in ready(),
                    # whether the process goes on without a topology.
                    with suppress(TopologyUnavailable):
                        self._add_groups()
        return self

    def _add_groups(self) -> None:
        if _resolver is None:
            return  # Applications are not loaded yet.
        groups = _resolver.group_aliases()
        taken = [name for name in groups if super(ShardedDatabases, self).__contains__(name)]
        if taken:
            raise InvalidConfiguration(
                f"group {name!r} has the name of an entry of DATABASES; rename one"
                for name in taken
            )
        self.update({name: complete(settings) for name, settings in groups.items()})
        self._groups_added = True

    def renew_groups(self) -> None:
        """Renew the settings of groups after a change of topology: their nodes may have changed."""
        if _resolver is None:
            return
        renewed = dict(_resolver.group_aliases()) if self._groups_added else {}
        for alias in self._exposed:
            if settings := _resolver.shard_alias(alias):
                renewed[alias] = settings
        # If the settings of one alias are incomplete, none is updated.
        self.update({alias: complete(settings) for alias, settings in renewed.items()})

    def _groups_changed(self, names: set[str]) -> None:
        """Forget the aliases of the groups ``names``: ``runtime.reset`` was called."""
        for name in names:
            if super().__contains__(name) and super().__getitem__(name)["ENGINE"] == GROUP_ENGINE:
                del self[name]
        self._groups_added = False

    def expose(self, arguments: Sequence[str]) -> None:
        """From now on, iterate also the shards that the command line names by ``--database``.

        :param arguments: the arguments of the command line.
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
        # A list: another thread may add a group that the topology has gained.
        return iter(list(super(ShardedDatabases, self._with_groups()).keys()))

    def __len__(self) -> int:
        return super(ShardedDatabases, self._with_groups()).__len__()

    def keys(self) -> KeysView[str]:  # type: ignore[override]  # dict_keys is final
        return super(ShardedDatabases, self._with_groups()).keys()

    def values(self) -> ValuesView[dict[str, Any]]:  # type: ignore[override]  # the mapping is lazy
        return super(ShardedDatabases, self._with_groups()).values()

    def items(self) -> ItemsView[str, dict[str, Any]]:  # type: ignore[override]  # the mapping is lazy
        return super(ShardedDatabases, self._with_groups()).items()


def sharded_databases(databases: Mapping[str, dict[str, Any]]) -> ShardedDatabases:
    """Return the value for ``DATABASES``: ``databases`` and, on demand, every shard.

    ::

        DATABASES = sharded_databases({"default": {...}})

    :param databases: the explicit aliases, the global database ``default`` among them.
    """
    return ShardedDatabases(databases)
