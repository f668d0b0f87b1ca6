"""Model formsets of sharded models: the id of a row that the formset does not have is an error.

A form of a formset has a hidden field with the primary key of its row. If the row is not among the
rows of the formset, because somebody has deleted it or a visitor sends any number, Django's field
searches the whole table. On shards this query names no shard, and is refused. A refusal is for the
developer, and not the answer to what a visitor has sent.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from django.forms.models import BaseModelFormSet, ModelChoiceField

from sharded_orm.models.relations.forms import names_shards
from sharded_orm.models.sharding.options import shard_options


def install_rows() -> None:
    """Make model formsets search no row outside of their own. Further calls do nothing."""
    add_fields = BaseModelFormSet.add_fields
    # Another package may have wrapped Django's function. So look for a mark of the own function,
    # which functools.wraps() copies if another package wraps this one.
    if hasattr(add_fields, "searches_own_rows"):
        return

    @wraps(add_fields)
    def add_fields_of_own_rows(self: Any, form: Any, index: int | None) -> None:
        add_fields(self, form, index)
        field = form.fields.get(self._pk_field.name)
        if isinstance(field, ModelChoiceField) and form.instance._state.db is None:
            field.queryset = _searched(field.queryset)

    add_fields_of_own_rows.searches_own_rows = True  # type: ignore[attr-defined]  # see above
    BaseModelFormSet.add_fields = add_fields_of_own_rows  # type: ignore[method-assign]  # Django has no hook here


def _searched(rows: Any) -> Any:
    """Return the rows that Django may search by their primary key: none if that names no shard."""
    options = None if rows is None else shard_options(rows.model)
    if options is None or options.names_shard(rows.model._meta.pk) or names_shards(rows):
        return rows
    return rows.none()
