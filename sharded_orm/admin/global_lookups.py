"""Lookups of sharded models that lead to the global database, answered there first.

``owner__username__icontains`` is a join that no shard can make: the ids of the people are
asked for, and the shards for rows with ``owner__in`` those ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.utils import build_q_object_from_lookup_parameters
from django.core.exceptions import FieldDoesNotExist
from django.db import DatabaseError
from django.db.models import Model
from django.db.models.constants import LOOKUP_SEP

from sharded_orm.models.sharding.options import shard_options
from sharded_orm.scatter.failures import is_node_gone

#: More rows of the global database than these are not looked for.
MOST_FOUND = 1000


@dataclass(frozen=True)
class GlobalLookup:
    """Where a lookup leaves the shards.

    ``prefix`` is the path to the foreign key, ``model`` the global model it refers to,
    ``rest`` what is asked of that.
    """

    prefix: str
    model: type[Model]
    rest: str
    attname: str

    @property
    def name(self) -> str:
        """The lookup of the sharded model that takes what is found."""
        return f"{self.prefix}__in"

    def find(self, queryset: Any, request: Any, sought: Any) -> list[Any]:
        """What rows of the shards refer to if they refer to one of ``queryset``, of the global model.

        One query. Of more than :data:`MOST_FOUND` the first ones are found, and :func:`cuts` of
        the request say so.
        """
        values = list(
            queryset.order_by().values_list(self.attname, flat=True).distinct()[: MOST_FOUND + 1]
        )
        if len(values) > MOST_FOUND:
            plural = self.model._meta.verbose_name_plural
            _cuts(request)[
                f"More than {MOST_FOUND} {plural} match {sought!r}, and only the first {MOST_FOUND}"
                " are looked for: narrow it."
            ] = None
        return values[:MOST_FOUND]

    def find_by(self, lookups: dict[str, Any], request: Any) -> list[Any]:
        """The same, by lookups of the global model as ChangeList has them: of lists of values.

        :raises IncorrectLookupParameters: they cannot be asked.
        """
        sought = ", ".join(str(value) for values in lookups.values() for value in values)
        try:
            condition = build_q_object_from_lookup_parameters(lookups)
            return self.find(self.model._default_manager.filter(condition), request, sought)
        except Exception as error:  # As ChangeList.get_queryset(): lookups may raise anything.
            # What is wrong with the pattern of a regex, the database says. That it is gone itself
            # is nothing wrong with the lookup.
            if isinstance(error, DatabaseError) and is_node_gone(error):
                raise
            raise IncorrectLookupParameters(error) from error


def cuts(request: Any) -> list[str]:
    """Sentences: for what the list of this request has not looked, as too much matches."""
    return list(_cuts(request))


def _cuts(request: Any) -> dict[str, None]:
    found: dict[str, None] = request.__dict__.setdefault("_sharded_orm_cuts", {})
    return found


def crossing(model: type[Model], path: str) -> GlobalLookup | None:
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
            return GlobalLookup(prefix, target, LOOKUP_SEP.join(rest), found.target_field.attname)
        current = target
    return None


def _leaves(found: Any, name: str, target: Any) -> bool:
    """Whether ``name`` is another field of the global model than the one referred to."""
    try:
        asked = target._meta.pk if name == "pk" else target._meta.get_field(name)
    except FieldDoesNotExist:
        return False
    return asked is not found.target_field
