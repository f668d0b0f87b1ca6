"""The tables of a group that have rows of a shard key, in an order that respects foreign keys."""

from __future__ import annotations

from graphlib import TopologicalSorter
from typing import Any

from django.apps import apps
from django.db.models import AutoField, Model

from sharded_orm.backends.change_capture import CapturedTable, KeyLink
from sharded_orm.models.sharding.copies import has_copies
from sharded_orm.models.sharding.options import shard_options
from sharded_orm.models.sharding.rows_of_keys import way_to_key


def tables_of_group(group: str) -> list[CapturedTable]:
    """Return all tables of the models of ``group``.

    These include automatic many-to-many tables, tables of child models, and tables of unmanaged
    models. A table without the shard key comes after the tables to which its foreign keys refer.
    Sends no query.
    """
    models: dict[str, type[Model]] = {}
    for model in apps.get_models(include_auto_created=True):
        options = shard_options(model)
        if options is not None and options.group == group and not model._meta.proxy:
            models.setdefault(model._meta.db_table, model)
    tables = {name: _table(model) for name, model in sorted(models.items())}
    order = TopologicalSorter(
        {name: {link.table for link in table.links} for name, table in tables.items()}
    )
    return [tables[name] for name in order.static_order()]


def _table(model: type[Model]) -> CapturedTable:
    links, key = way_to_key(model)
    pks = tuple(_column(field) for field in model._meta.pk_fields)
    copies = (
        field
        for field in model._meta.local_concrete_fields
        if has_copies(field.related_model) and getattr(field, "db_constraint", False)
    )
    return CapturedTable(
        model._meta.db_table,
        pks,
        _column(key),
        tuple(map(_link, links)),
        _gets_fresh_ids(model),
        copies=tuple(map(_link, copies)),
    )


def _link(reference: Any) -> KeyLink:
    target = reference.target_field
    return KeyLink(_column(reference), target.model._meta.db_table, _column(target))


def _gets_fresh_ids(model: type[Model]) -> bool:
    """Return whether moved rows of ``model`` get new ids on the target.

    On the target, another row may have the old id already. In an automatic many-to-many table whose
    ids the database makes, a row can get a new id, because no other row refers to the old one.
    """
    is_referred_to = any(
        field.auto_created and not field.concrete
        for field in model._meta.get_fields(include_hidden=True)
    )
    return (
        bool(model._meta.auto_created)
        and isinstance(model._meta.pk, AutoField)
        and not is_referred_to
    )


def _column(field: Any) -> str:
    assert field.column is not None
    return str(field.column)
