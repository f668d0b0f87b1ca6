"""A Django extension that spreads tables over thousands of logical shards on a few database servers.

The names in ``__all__`` are the public API for models and views.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

__all__ = [
    "ExactCharField",
    "GlobalModel",
    "PackedIDField",
    "ShardedModel",
    "TicketField",
    "TimestampedIDField",
    "atomic",
    "bound",
    "cache_scope",
    "fetch_together",
    "move_key",
    "reads_own_row",
    "unbound",
    "uncached",
]

if TYPE_CHECKING:
    from sharded_orm.cache.request_cache import cache_scope, uncached
    from sharded_orm.models import (
        ExactCharField,
        GlobalModel,
        PackedIDField,
        ShardedModel,
        TicketField,
        TimestampedIDField,
    )
    from sharded_orm.models.cached.queryset import fetch_together
    from sharded_orm.models.sharding.bound_key import bound, unbound
    from sharded_orm.models.sharding.expressions import reads_own_row
    from sharded_orm.operations.moves import move_key
    from sharded_orm.transactions import atomic


def __getattr__(name: str) -> Any:
    # Import a public name when it is used first (PEP 562), and not when the package is imported.
    # Django imports the package before the app registry is ready, so no model could be imported at
    # that time. After the first use, the name is an ordinary attribute of the module.
    value = globals()[name] = _public(name)
    return value


def _public(name: str) -> Any:
    if name == "atomic":
        from sharded_orm.transactions import atomic

        return atomic
    if name in ("bound", "unbound"):
        from sharded_orm.models.sharding import bound_key

        return getattr(bound_key, name)
    if name in ("cache_scope", "uncached"):
        from sharded_orm.cache import request_cache

        return getattr(request_cache, name)
    if name == "fetch_together":
        from sharded_orm.models.cached.queryset import fetch_together

        return fetch_together
    if name == "move_key":
        from sharded_orm.operations.moves import move_key

        return move_key
    if name == "reads_own_row":
        from sharded_orm.models.sharding.expressions import reads_own_row

        return reads_own_row
    if name in __all__:
        from sharded_orm import models

        return getattr(models, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
