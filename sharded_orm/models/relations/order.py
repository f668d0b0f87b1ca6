"""The order of rows with ``order_with_respect_to``. All rows with the same related row have an
order.

The methods of Django compare only the id of the related row, so their queries do not determine a
shard. This module replaces them.
"""

from __future__ import annotations

from functools import partialmethod
from typing import Any

from django.db.models import Model
from django.db.models.fields.related import lazy_related_operation

from sharded_orm.models.moves.confirmation import confirmed
from sharded_orm.models.sharding.current_shard import current_alias
from sharded_orm.models.sharding.key_errors import shard_key_required
from sharded_orm.models.sharding.same_key import key_for_related


def install_order(model: type[Model]) -> None:
    """Replace Django's methods ``get_…_order()`` and ``set_…_order()`` for rows of ``model``.

    Django sets them on the model to which ``order_with_respect_to`` refers.
    """
    # This is a field by now, but the type stubs say that it is the name of the field.
    relation: Any = model._meta.order_with_respect_to
    if relation is not None and relation.remote_field is not None:
        # Django has called lazy_related_operation() earlier. So Django's methods are set first, and
        # these methods replace them.
        lazy_related_operation(_install_accessors, model, relation.remote_field.model)


def _install_accessors(model: Any, related_model: Any) -> None:
    name = model.__name__.lower()
    setattr(related_model, f"get_{name}_order", partialmethod(_get_order, model))
    setattr(related_model, f"set_{name}_order", partialmethod(_set_order, model))


def _get_order(related: Any, model: Any) -> Any:
    relation = model._meta.order_with_respect_to
    # An instance as the value determines the shard.
    rows = model.objects.filter(**{relation.name: related})
    return rows.values_list(model._meta.pk.name, flat=True)


def _set_order(related: Any, model: Any, id_list: Any, using: str | None = None) -> None:
    relation = model._meta.order_with_respect_to
    rows = model.objects.db_manager(using).filter(**{relation.name: related})
    keys = _key_of_rows(model, relation, related)
    ids = list(id_list)
    if keys is None:
        ids = list(map(model._meta.pk.to_python, ids))
        # If ``ids`` contains None, bulk_update() must raise the same error as for other models. So
        # pass a row without a primary key to it.
        row_by_id = {None: model(), **rows.in_bulk()}
        ordered = [row_by_id[pk] for pk in dict.fromkeys(ids) if pk in row_by_id]
        for row in ordered:
            row._order = ids.index(row.pk)
    else:
        ordered = [model(pk=pk, _order=number, **keys) for number, pk in enumerate(ids)]
    rows.bulk_update(ordered, ["_order"])


def neighbour_in_order(row: Any, *, is_next: bool) -> Any:
    """Return the row that follows or precedes ``row`` in its order.

    :raises DoesNotExist: there is no such row.
    :raises ShardKeyRequired: ``row`` has no related row, so it is ordered among the rows of its
        shard only.
    """
    relation = row._meta.order_with_respect_to
    options, values = row._shard_options(), relation.get_filter_kwargs_for_object(row)
    if None in values.values():
        what = f"each shard numbers its rows without {relation.name!r} by itself"
        raise shard_key_required(options, what)
    comparison, order = ("gt", "_order") if is_next else ("lt", "-_order")

    def read() -> Any:
        rows = type(row)._default_manager.using(current_alias(options, row))
        own = rows.filter(pk=row.pk).values("_order")
        same = rows.filter(**values)
        return same.filter(**{f"_order__{comparison}": own}).order_by(order)[:1].get()

    return confirmed(options.group, read)


def _key_of_rows(model: Any, relation: Any, related: Any) -> dict[str, Any] | None:
    """Return the shard key of the rows that refer to ``related``; None if their keys may differ."""
    return key_for_related(model, relation, related, load=True) or None
