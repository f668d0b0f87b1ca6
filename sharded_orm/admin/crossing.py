"""Lookups of sharded models that lead to the global database, answered there first.

``owner__username__icontains`` is a join that no shard can make: the ids of the people are
asked for, and the shards for rows with ``owner__in`` those ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.core.exceptions import FieldDoesNotExist
from django.db.models import Model
from django.db.models.constants import LOOKUP_SEP

from sharded_orm.models.options import shard_options

#: More rows of the global database than these are not looked for.
MOST_FOUND = 1000


@dataclass(frozen=True)
class Crossing:
    """Where a lookup leaves the shards.

    ``prefix`` is the path to the foreign key, ``model`` the global model it refers to,
    ``rest`` what is asked of that.
    """

    prefix: str
    model: type[Model]
    rest: str
    attname: str

    def find(self, queryset: Any) -> tuple[dict[str, Any], bool]:
        """The condition that stands for the rows of ``queryset``, of the global model.

        And whether there are more of them than are looked for. One query.
        """
        values = list(
            queryset.order_by().values_list(self.attname, flat=True).distinct()[: MOST_FOUND + 1]
        )
        return {f"{self.prefix}__in": values[:MOST_FOUND]}, len(values) > MOST_FOUND


def crossing(model: type[Model], path: str) -> Crossing | None:
    """Where ``path``, a lookup of ``model``, leaves the shards; None if it does not.

    The foreign key's own value is on the shard: ``owner``, ``owner__id`` and
    ``owner__isnull`` do not leave it.
    """
    if shard_options(model) is None:
        return None
    parts = path.split(LOOKUP_SEP)
    current: Any = model
    for index, part in enumerate(parts):
        try:
            found: Any = current._meta.pk if part == "pk" else current._meta.get_field(part)
        except FieldDoesNotExist:
            return None
        if not found.is_relation or not getattr(found, "path_infos", None):
            return None
        target = found.path_infos[-1].to_opts.model
        if shard_options(target) is None:
            rest = parts[index + 1 :]
            if not rest or not _leaves(found, rest[0], target):
                return None
            prefix = LOOKUP_SEP.join(parts[: index + 1])
            return Crossing(prefix, target, LOOKUP_SEP.join(rest), found.target_field.attname)
        current = target
    return None


def _leaves(found: Any, name: str, target: Any) -> bool:
    """Whether ``name`` is another field of the global model than the one referred to."""
    try:
        asked = target._meta.pk if name == "pk" else target._meta.get_field(name)
    except FieldDoesNotExist:
        return False
    return asked is not found.target_field
