"""Lookups of sharded models that lead to the global database are answered there first.

``owner__username__icontains`` is a join that no shard can make. The global database is asked for
the ids of the owners, and then the shards for rows with ``owner__in`` these ids.
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

#: Values of the global database that a lookup passes on to the shards, at most.
MAX_VALUES = 1000


@dataclass(frozen=True)
class GlobalLookup:
    """A lookup of a sharded model, split where it leaves the shards.

    ``prefix`` is the path to the foreign key, ``model`` the global model to which the key refers,
    ``rest`` the lookup of that model, ``attname`` the attribute to which the key refers.
    """

    prefix: str
    model: type[Model]
    rest: str
    attname: str

    @property
    def name(self) -> str:
        """The lookup of the sharded model for the values of :meth:`find`."""
        return f"{self.prefix}__in"

    def find(self, queryset: Any, request: Any, term: Any) -> list[Any]:
        """The values by which rows of shards refer to rows of ``queryset``, of the global model.

        One query. At most :data:`MAX_VALUES`; if there are more, :func:`lookup_notes` say so.

        :param term: the text that the user looks for.
        """
        values = list(
            queryset.order_by().values_list(self.attname, flat=True).distinct()[: MAX_VALUES + 1]
        )
        if len(values) > MAX_VALUES:
            plural = self.model._meta.verbose_name_plural
            _lookup_notes(request)[
                f"More than {MAX_VALUES} {plural} match {term!r}, and only the first {MAX_VALUES}"
                " are looked for: narrow it."
            ] = None
        return values[:MAX_VALUES]

    def find_by(self, lookups: dict[str, Any], request: Any) -> list[Any]:
        """The same, by lookups of the global model: name -> lists of values, as in ChangeList.

        :raises IncorrectLookupParameters: a lookup or a value is wrong.
        """
        term = ", ".join(str(value) for values in lookups.values() for value in values)
        try:
            condition = build_q_object_from_lookup_parameters(lookups)
            return self.find(self.model._default_manager.filter(condition), request, term)
        except Exception as error:  # As ChangeList.get_queryset(): lookups may raise anything.
            # A database error may mean a wrong pattern of a regex. An unreachable database does
            # not make the lookup wrong.
            if isinstance(error, DatabaseError) and is_node_gone(error):
                raise
            raise IncorrectLookupParameters(error) from error


def lookup_notes(request: Any) -> list[str]:
    """Sentences about lookups of this request that match too much, and are answered in part."""
    return list(_lookup_notes(request))


def _lookup_notes(request: Any) -> dict[str, None]:
    # A dict for its order, and because a sentence may come twice.
    notes: dict[str, None] = request.__dict__.setdefault("_sharded_orm_lookup_notes", {})
    return notes


def global_lookup(model: type[Model], path: str) -> GlobalLookup | None:
    """``path``, a lookup of ``model``, split where it leaves the shards; None if it does not.

    The foreign key's own value is on the shard: ``owner``, ``owner__id`` and
    ``owner__isnull`` do not leave it.
    """
    if shard_options(model) is None:
        return None
    parts = path.split(LOOKUP_SEP)
    current: Any = model
    for index, part in enumerate(parts):
        try:
            field: Any = current._meta.pk if part == "pk" else current._meta.get_field(part)
        except FieldDoesNotExist:
            return None
        if not field.is_relation or not getattr(field, "path_infos", None):
            return None
        target = field.path_infos[-1].to_opts.model
        if shard_options(target) is None:
            rest = parts[index + 1 :]
            if not rest or not _leaves(field, rest[0], target):
                return None
            prefix = LOOKUP_SEP.join(parts[: index + 1])
            return GlobalLookup(prefix, target, LOOKUP_SEP.join(rest), field.target_field.attname)
        current = target
    return None


def _leaves(foreign_key: Any, name: str, target: Any) -> bool:
    """Whether ``name`` is another field of the global model than the key refers to."""
    try:
        field = target._meta.pk if name == "pk" else target._meta.get_field(name)
    except FieldDoesNotExist:
        return False
    return field is not foreign_key.target_field
