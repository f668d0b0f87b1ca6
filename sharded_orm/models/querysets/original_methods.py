"""The methods of Django's ``QuerySet`` that this package does not always call.

A read or an update by a plan, which is SQL that was compiled once for all similar queries, skips
them. Another package may replace one of these methods while the program runs, for example to
observe reads, and so may a test. Then Django must do the read or the update, because it calls the
replacement. A replacement may claim to be equal to the original in this module, so compare with
``is``.

:mod:`sharded_orm.models.querysets.first_recordings` examines which methods a queryset class
overrides when it is first used.
"""

from __future__ import annotations

from typing import Any

from django.db.models.query import QuerySet

INIT, FETCH_ALL = QuerySet.__init__, QuerySet._fetch_all
FILTER, EXCLUDE, ORDER_BY = QuerySet.filter, QuerySet.exclude, QuerySet.order_by
FIRST, EXISTS, COUNT = QuerySet.first, QuerySet.exists, QuerySet.count
ITEM, ORDERED, PREFETCH = QuerySet.__getitem__, QuerySet.ordered, QuerySet.prefetch_related
CREATE, UPDATE = QuerySet.create, QuerySet.update
_GET, _LEN = QuerySet.get, QuerySet.__len__
#: The methods that select fields, by name.
SELECTING = {
    name: getattr(QuerySet, name)
    for name in ("values", "values_list", "only", "defer", "select_related")
}


def gets_as_django(queryset_class: Any, recorder: Any) -> bool:
    """Return whether ``get()`` of this class would call only methods that a plan may skip.

    Django's ``get()`` calls ``filter()``, ``order_by()`` and ``len()``. If a project has overridden
    one of them, or replaced one of Django's, Django must do the read.

    :param recorder: the mixin that records calls, a base class of ``queryset_class``.
    """
    return (
        queryset_class.filter is recorder.filter
        and queryset_class.order_by is recorder.order_by
        and queryset_class.__len__ is _LEN
        and QuerySet.filter is FILTER
        and QuerySet.order_by is ORDER_BY
        and QuerySet.get is _GET
    )
