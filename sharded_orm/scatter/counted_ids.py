"""Recognizes ids that each shard counts by itself. Equal ids of two shards belong to different rows.

Only the models know which fields have such ids, and this layer knows no models. So the app provides
the function that answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from django.db.models.expressions import Col

from sharded_orm.scatter.refusals import refuse


def _none(field: Any) -> bool:
    return False


_counts_per_shard: Callable[[Any], bool] = _none


def provide(counts_per_shard: Callable[[Any], bool]) -> None:
    """Set the function that answers whether each shard counts the ids in a field by itself.

    For a foreign key, the answer is about the ids that it refers to.
    """
    global _counts_per_shard
    _counts_per_shard = counts_per_shard


def refuse_comparison(parts: Iterable[Any]) -> None:
    """Refuse to merge rows of several shards that are equal in ids which each shard counts by itself.

    :param parts: the expressions in which rows are compared, and all expressions inside them.
    :raises ScatterNotSupported: one of them is a column with such ids.
    """
    for part in parts:
        if isinstance(part, Col) and _counts_per_shard(part.target):
            field = part.target
            raise refuse(
                f"distinct(), distinct=True or groups by {field.model.__name__}.{field.name}, whose"
                " ids each shard counts by itself",
                "add the shard key to values(), if it is not text; or use ids that are unique over all"
                " shards, such as those of a TicketField",
            )
