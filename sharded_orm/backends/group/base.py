"""The module that ``ENGINE`` names for the alias of a whole shard group. Django looks for
``DatabaseWrapper`` in it.
"""

from __future__ import annotations

import threading
from typing import Any

from django.db import DEFAULT_DB_ALIAS

from sharded_orm.backends.group.alias import GroupAliasMixin, engine_of
from sharded_orm.backends.group.member import ShardConnectionMixin
from sharded_orm.backends.group.refusals import (
    GroupClient,
    GroupIntrospection,
    GroupOperations,
)
from sharded_orm.backends.group.test_databases import GroupCreation

_lock = threading.Lock()
_classes: dict[type, type[GroupAliasMixin]] = {}


def group_wrapper_class(engine: type[ShardConnectionMixin]) -> type[GroupAliasMixin]:
    """Return the ``DatabaseWrapper`` class for the alias of a whole shard group.

    The first call for each ``engine`` creates the class. Thread-safe.

    :param engine: the ``DatabaseWrapper`` class of the backend that the group's nodes use.
    """
    with _lock:
        if engine not in _classes:
            parts = {
                "ops_class": (GroupOperations, engine.ops_class),
                "introspection_class": (GroupIntrospection, engine.introspection_class),
                "client_class": (GroupClient, engine.client_class),
                "creation_class": (GroupCreation, engine.creation_class),
            }
            _classes[engine] = type(
                "DatabaseWrapper",
                (GroupAliasMixin, engine),
                {
                    "__module__": __name__,
                    **{name: type(bases[0].__name__, bases, {}) for name, bases in parts.items()},
                },
            )
        return _classes[engine]


def DatabaseWrapper(
    settings_dict: dict[str, Any], alias: str = DEFAULT_DB_ALIAS
) -> GroupAliasMixin:
    """Create the connection object of a group's alias. Django calls this function like a class."""
    return group_wrapper_class(engine_of(settings_dict))(settings_dict, alias)
