"""Search in fields of a sharded model, and in fields of global models to which its rows refer."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

from django.contrib.admin.options import ModelAdmin
from django.db.models import Model
from django.utils.text import smart_split

from sharded_orm.admin.global_lookups import GlobalLookup, global_lookup

_PREFIXES = "^=@"


def leads_to_global(model: type[Model], fields: Sequence[str]) -> bool:
    """Whether any of the search fields ``fields`` belongs to a model of the global database."""
    return any(global_lookup(model, _path(field)) is not None for field in fields)


def search(queryset: Any, fields: Sequence[str], term: str, request: Any) -> tuple[Any, bool]:
    """Search as :meth:`ModelAdmin.get_search_results` does, in sharded and in global fields.

    Costs one query of the global database for each word and each foreign key to a global model. If
    a word matches too many global rows, :func:`global_lookups.lookup_notes` returns a sentence
    about it.

    :param fields: names of fields of the sharded model, and of global models to which the model
        refers.
    :return: the matching rows, and whether joins may return the same row twice.
    """
    model = queryset.model
    own_fields: list[str] = []
    global_fields: dict[str, tuple[GlobalLookup, list[str]]] = {}
    for name in map(str, fields):
        lookup = global_lookup(model, _path(name))
        if lookup is None:
            own_fields.append(name)
        else:
            prefix = name[0] if name[0] in _PREFIXES else ""
            global_fields.setdefault(lookup.prefix, (lookup, []))[1].append(prefix + lookup.rest)
    may_have_duplicates = False
    for word in smart_split(term):
        querysets = []
        if own_fields:
            matching, duplicates = _search_as_django(queryset, own_fields, word)
            may_have_duplicates |= duplicates
            querysets.append(matching)
        for lookup, names in global_fields.values():
            global_rows, _ = _search_as_django(lookup.model._default_manager.all(), names, word)
            values = lookup.find(global_rows, request, word)
            querysets.append(queryset.filter(**{lookup.name: values}))
        queryset = functools.reduce(operator.or_, querysets)
    return queryset, may_have_duplicates


def _path(field: str) -> str:
    return str(field).lstrip(_PREFIXES)


class _SearchFields:
    """A stand-in for a model admin, so that ``ModelAdmin.get_search_results()`` can be called.

    Django's method reads the model and the search fields from ``self``. If ``self`` is an object of
    this class, the method searches in only a part of the model admin's search fields, or in a model
    that has no model admin.
    """

    def __init__(self, model: type[Model], fields: Sequence[str]) -> None:
        self.opts, self.fields = model._meta, fields

    def get_search_fields(self, request: Any) -> Sequence[str]:
        return self.fields


def _search_as_django(queryset: Any, fields: Sequence[str], word: str) -> tuple[Any, bool]:
    model_admin: Any = _SearchFields(queryset.model, fields)
    # Django's method needs the request only to call get_search_fields(), which ignores it in this
    # class. So pass None.
    request: Any = None
    return ModelAdmin.get_search_results(model_admin, request, queryset, word)
