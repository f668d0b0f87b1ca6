"""Recognizes fields whose ids are unique only within a shard, such as an AutoField.

Each shard counts such ids separately, so two rows on two shards may have the same id. The package
``scatter`` does not know which fields have such ids. So the AppConfig of ``sharded_orm`` registers
a function that recognizes these fields (:func:`provide`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from django.db.models.expressions import Col
from django.db.models.fields.related_lookups import RelatedIsNull
from django.db.models.lookups import IsNull

from sharded_orm.scatter.refusals import parts_of, refuse


def _none(field: Any) -> bool:
    return False


_counts_per_shard: Callable[[Any], bool] = _none


def provide(counts_per_shard: Callable[[Any], bool]) -> None:
    """Register the function that tells whether the ids in a field are unique only within a shard.

    For a foreign key, the function must look at the field to which the foreign key refers.
    """
    global _counts_per_shard
    _counts_per_shard = counts_per_shard


def refuse_comparison(expressions: Iterable[Any]) -> None:
    """Raise an error if rows would be compared by ids that are unique only within a shard.

    For example, DISTINCT on such ids would take unrelated rows of two shards for equal.

    :param expressions: the expressions by which rows are compared.
    :raises ScatterNotSupported: the value of one of ``expressions`` depends on such ids.
    """
    for part in chain.from_iterable(parts_of(each, _is_null_test) for each in expressions):
        if isinstance(part, Col) and _counts_per_shard(part.target):
            field = part.target
            raise refuse(
                f"distinct(), distinct=True or groups by {field.model.__name__}.{field.name}, whose"
                " ids each shard counts by itself",
                "add the shard key to values(), if it is not text; or use ids that are unique over all"
                " shards, such as those of a TicketField",
            )


def _is_null_test(part: Any) -> bool:
    """Whether ``part`` only tests whether a column is NULL, as ``__isnull`` does.

    The result of such a test does not depend on the value of the id.
    """
    return type(part) in (IsNull, RelatedIsNull) and isinstance(part.lhs, Col)
