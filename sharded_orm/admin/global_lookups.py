"""Lookups of sharded models by columns of the global database.

``owner__username__icontains`` needs a join of two databases, which no shard can make. So two
queries replace the join. The first query finds the ids of the matching owners in the global
database. The second query finds the rows on the shards by ``owner__in`` with these ids.
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

from sharded_orm.models.sharding.copies import has_copies
from sharded_orm.models.sharding.options import shard_options
from sharded_orm.scatter.failures import is_node_gone

#: A lookup passes at most this many values from the global database on to the shards.
MAX_VALUES = 1000


@dataclass(frozen=True)
class GlobalLookup:
    """A lookup of a sharded model, split after the foreign key that leads to the global database.

    The parts of ``owner__username__icontains``, for example:

    - ``prefix``: the path to the foreign key (``owner``)
    - ``model``: the global model to which the key refers
    - ``rest``: the lookup of that model (``username__icontains``)
    - ``attname``: the attribute of that model to which the key refers (``id``)
    """

    prefix: str
    model: type[Model]
    rest: str
    attname: str

    @property
    def name(self) -> str:
        """The lookup of the sharded model that finds the rows, such as ``owner__in``. Its value is
        the list that :meth:`find` returns.
        """
        return f"{self.prefix}__in"

    def find(self, queryset: Any, request: Any, term: Any) -> list[Any]:
        """Return the ids of the global rows in ``queryset``, as foreign keys of sharded rows store
        them.

        For a foreign key with ``to_field``, these are the values of that field. Costs one query.
        Returns at most :data:`MAX_VALUES` values. If there are more, adds a sentence that says so
        to the result of :func:`lookup_notes`.

        :param queryset: rows of the global model.
        :param term: the text that the user searched for; quoted in the sentence.
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
        """Return the ids of the global rows that match ``lookups``, as :meth:`find` does.

        :param lookups: maps a lookup of the global model to a list of values, as in Django's
            ``ChangeList``.
        :raises IncorrectLookupParameters: a lookup or a value is wrong.
        """
        term = ", ".join(str(value) for values in lookups.values() for value in values)
        try:
            condition = build_q_object_from_lookup_parameters(lookups)
            return self.find(self.model._default_manager.filter(condition), request, term)
        # Catch every exception, as Django's ChangeList does, because lookups may raise any error.
        except Exception as error:
            # Most database errors here mean that the lookup is wrong, such as a bad regular
            # expression. But if the database cannot be reached, the lookup may be right. So raise
            # that error unchanged.
            if isinstance(error, DatabaseError) and is_node_gone(error):
                raise
            raise IncorrectLookupParameters(error) from error


def lookup_notes(request: Any) -> list[str]:
    """Return sentences about the lookups of this request that match too many global rows.

    Such a lookup uses only :data:`MAX_VALUES` of the matching rows.
    """
    return list(_lookup_notes(request))


def _lookup_notes(request: Any) -> dict[str, None]:
    # Store the sentences as keys of a dict, which keeps their order and drops repeated sentences.
    notes: dict[str, None] = request.__dict__.setdefault("_sharded_orm_lookup_notes", {})
    return notes


def global_lookup(
    model: type[Model], path: str, *, joins_copies: bool = False
) -> GlobalLookup | None:
    """Split ``path``, a lookup of ``model``, after its foreign key to the global database.

    Return None if ``model`` is not sharded, or if the lookup needs no column of the global
    database. For example, ``owner``, ``owner__id`` and ``owner__isnull`` need only the value of the
    foreign key.

    :param joins_copies: matters only if the foreign key leads to a reference table, of which each
        shard has a copy. If True, the lookup may join the copy on the shard, so it is not split,
        and the result is None. If False, it is split. A filter passes False, because it reads its
        choices from the global database.
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
        if shard_options(target) is None and not (joins_copies and has_copies(target)):
            rest = parts[index + 1 :]
            if not rest or not _leaves(field, rest[0], target):
                return None
            prefix = LOOKUP_SEP.join(parts[: index + 1])
            return GlobalLookup(prefix, target, LOOKUP_SEP.join(rest), field.target_field.attname)
        current = target
    return None


def _leaves(foreign_key: Any, name: str, target: Any) -> bool:
    """Whether ``name`` is a field that a query can read only in the table of ``target``, and not in
    the column of a foreign key. For example, True for ``username`` after ``owner``, and False for
    ``id``.

    :param target: the model to which ``foreign_key`` refers.
    """
    try:
        field = target._meta.pk if name == "pk" else target._meta.get_field(name)
    except FieldDoesNotExist:
        return False
    return field is not foreign_key.target_field
