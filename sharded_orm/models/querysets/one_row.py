"""Helpers for ``get()``: they read the row, and raise the same errors as Django."""

from __future__ import annotations

from typing import Any

from django.db.models.query import MAX_GET_RESULTS


def matching_rows(queryset: Any) -> list[Any]:
    """Return at most ``MAX_GET_RESULTS`` rows of ``queryset``, for ``get()``.

    This function changes the query of ``queryset``: it removes the ordering and sets a limit.
    """
    queryset.query.clear_ordering(force=True)
    queryset.query.set_limits(high=MAX_GET_RESULTS)
    return list(queryset)


def only_row(model: Any, rows: list[Any]) -> Any:
    """Return the only row in ``rows``; otherwise raise the same error as Django's ``get()``.

    :param rows: the rows that match, at most ``MAX_GET_RESULTS``.
    """
    if len(rows) == 1:
        return rows[0]
    name = model._meta.object_name
    if not rows:
        raise model.DoesNotExist(f"{name} matching query does not exist.")
    is_all = len(rows) < MAX_GET_RESULTS
    found = str(len(rows)) if is_all else f"more than {MAX_GET_RESULTS - 1}"
    raise model.MultipleObjectsReturned(
        f"get() returned more than one {name} -- it returned {found}!"
    )
