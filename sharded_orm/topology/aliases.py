"""``DATABASES`` with shard aliases that are made on demand.

Django walks every key of ``DATABASES`` several times per request, so thousands of
configured aliases would cost milliseconds before any work. This mapping *holds* the
explicit aliases and one alias per shard group, and *answers* for every shard.
"""

from __future__ import annotations

import threading
from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from contextlib import suppress
from typing import Any

from sharded_orm.exceptions import InvalidConfiguration, TopologyUnavailable

GROUP_ENGINE = "sharded_orm.backends.group"

# django.db.utils.ConnectionHandler.configure_settings sets these on what it can
# iterate; shard aliases are made later and get them here.
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


# Held while group aliases are added: the first requests of two threads may come at once.
_adding = threading.RLock()


def complete(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``settings`` with Django's defaults for an entry of ``DATABASES``."""
    full = {**_DEFAULTS, **settings}
    full["OPTIONS"] = dict(full.get("OPTIONS") or {})
    full["TEST"] = {**_TEST_DEFAULTS, **(full.get("TEST") or {})}
    return full


class ShardedDatabases(dict[str, dict[str, Any]]):
    """See :func:`sharded_databases`.

    Iteration yields explicit and group aliases only: its cost does not depend on how
    many shards there are. Shard aliases answer ``in``, ``[]`` and ``get``; each
    look-up makes a new dict, so nothing grows with the number of shards touched.
    """

    _groups_added = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Shards that are iterated over.
        self._exposed: list[str] = []

    def _with_groups(self) -> ShardedDatabases:
        # SHARDED_ORM may stand below DATABASES in the settings module, so the groups
        # are added at first use, when Django's settings are complete.
        if not self._groups_added:
            with _adding:
                if not self._groups_added:
                    # Models ask while they are loaded; whether to go on without a topology
                    # is decided when the app is ready.
                    with suppress(TopologyUnavailable):
                        self._add_groups()
        return self

    def _add_groups(self) -> None:
        from sharded_orm import runtime

        current = runtime.topology()
        groups = current.groups
        taken = [name for name in groups if super(ShardedDatabases, self).__contains__(name)]
        if taken:
            raise InvalidConfiguration(
                f"group {name!r} has the name of an entry of DATABASES; rename one"
                for name in taken
            )
        self.update(
            {name: complete(runtime.group_settings(g, current)) for name, g in groups.items()}
        )
        self._groups_added = True

    def renew_groups(self) -> None:
        """The topology has changed: what stands for a group may name another node."""
        from sharded_orm import runtime

        current = runtime.topology()
        made = {}
        if self._groups_added:
            for name, group in current.groups.items():
                made[name] = complete(runtime.group_settings(group, current))
        for alias in self._exposed:
            if found := runtime.alias_settings(alias):
                made[alias] = complete(found)
        self.update(made)  # All or, if one cannot be made, none.

    def _groups_changed(self, names: set[str]) -> None:
        """Forget the group aliases (``runtime.reset``: settings were overridden)."""
        for name in names:
            if super().__contains__(name) and super().__getitem__(name)["ENGINE"] == GROUP_ENGINE:
                del self[name]
        self._groups_added = False

    def expose(self, arguments: Sequence[str]) -> None:
        """Iterate the shards that ``arguments`` name by ``--database``, too."""
        from sharded_orm import runtime

        for position, argument in enumerate(arguments):
            option, _, alias = argument.partition("=")
            if option == "--database":
                alias = alias or "".join(arguments[position + 1 : position + 2])
                found = runtime.alias_settings(alias)
                if found is not None:
                    self._exposed.append(alias)
                    self[alias] = complete(found)

    def __missing__(self, alias: str) -> dict[str, Any]:
        from sharded_orm import runtime

        self._with_groups()
        if super().__contains__(alias):
            return super().__getitem__(alias)
        found = runtime.alias_settings(alias) if isinstance(alias, str) else None
        if found is None:
            raise KeyError(alias)
        return complete(found)

    def __contains__(self, alias: object) -> bool:
        if super().__contains__(alias):
            return True
        from sharded_orm import runtime

        self._with_groups()
        return super().__contains__(alias) or (
            isinstance(alias, str) and runtime.topology().resolve(alias) is not None
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
    """What ``DATABASES`` is set to: the given aliases plus every shard, on demand.

    ::

        DATABASES = sharded_databases({"default": {...}})

    :param databases: the explicit aliases, the global database ``default`` among them.
    """
    return ShardedDatabases(databases)
