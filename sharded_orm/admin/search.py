"""Search terms, also in fields of global models that rows of a shard refer to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.contrib.admin.options import ModelAdmin
from django.db.models import Model
from django.utils.text import smart_split

from sharded_orm.admin.global_lookups import crossing

_PREFIXES = "^=@"


def crosses(model: type[Model], fields: Sequence[str]) -> bool:
    """Whether any of the search fields leads to the global database."""
    return any(crossing(model, _path(field)) is not None for field in fields)


def search(queryset: Any, fields: Sequence[str], term: str, request: Any) -> tuple[Any, bool]:
    """What :meth:`ModelAdmin.get_search_results` gives, for fields that lead to both sides.

    One query of the global database for each word and global model; see :func:`crossing.cuts`.
    """
    model = queryset.model
    own: list[str] = []
    outside: dict[str, tuple[Any, list[str]]] = {}
    for name in map(str, fields):
        found = crossing(model, _path(name))
        if found is None:
            own.append(name)
        else:
            prefix = name[0] if name[0] in _PREFIXES else ""
            outside.setdefault(found.prefix, (found, []))[1].append(prefix + found.rest)
    duplicates = False
    for word in smart_split(term):
        conditions = []
        for found, theirs in outside.values():
            people, _ = _as_django(found.model._default_manager.all(), theirs, word)
            meant = {found.name: found.find(people, request, word)}
            conditions.append(queryset.filter(**meant))
        matching = None
        if own:
            matching, several = _as_django(queryset, own, word)
            duplicates |= several
        for other in conditions:
            matching = other if matching is None else matching | other
        queryset = matching
    return queryset, duplicates


def _path(field: str) -> str:
    return str(field).lstrip(_PREFIXES)


class _Searched:
    """As much of a model admin as Django's search asks of it.

    That is a method of model admins, and reads the fields from ``self``. Here it searches in a part
    of them, on one side of a crossing, and in models that may have no admin; to copy it would be
    to copy its prefixes and lookups, and how it finds out which joins give rows twice.
    """

    def __init__(self, model: type[Model], fields: Sequence[str]) -> None:
        self.opts, self.fields = model._meta, fields

    def get_search_fields(self, request: Any) -> Sequence[str]:
        return self.fields


def _as_django(queryset: Any, fields: Sequence[str], word: str) -> tuple[Any, bool]:
    searched: Any = _Searched(queryset.model, fields)
    request: Any = None  # It is handed to get_search_fields(), and to nothing else.
    return ModelAdmin.get_search_results(searched, request, queryset, word)
