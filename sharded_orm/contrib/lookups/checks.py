"""System checks of ``ShardMeta.lookups``. No check queries a database.

==========================  ==========================================================
``sharded_orm_lookups.E001``  ``ShardMeta.lookups`` names no field of the model's own table
``sharded_orm_lookups.E002``  the model cannot have this lookup
``sharded_orm_lookups.E003``  the collation treats different texts as equal
``sharded_orm_lookups.W004``  the entries are in the SQLite file of the global database
==========================  ==========================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.apps import AppConfig
from django.core import checks
from django.db import DEFAULT_DB_ALIAS, connections

from sharded_orm.backends.features import features_of
from sharded_orm.checks.selection import models_to_check
from sharded_orm.contrib.lookups.declaration import (
    declared,
    declared_inexact,
    lookups_of,
    own_field,
)
from sharded_orm.contrib.lookups.lookup import Lookup
from sharded_orm.models.sharding.options import shard_options


@checks.register(checks.Tags.models)
def check_lookups(
    app_configs: Sequence[AppConfig] | None = None, **kwargs: Any
) -> list[checks.CheckMessage]:
    """Check the lookups of sharded models."""
    return [message for model in models_to_check(app_configs) for message in _check(model)]


def _check(model: Any) -> Iterator[checks.CheckMessage]:
    if model._meta.proxy or shard_options(model) is None:
        return
    inherited = {
        each.field
        for parent in model._meta.all_parents
        for each in declared(parent)
        if isinstance(each, Lookup)
    }
    for each in declared(model):
        if own_field(model, each) is None and getattr(each, "field", None) not in inherited:
            names = sorted(field.name for field in model._meta.local_concrete_fields)
            yield checks.Error(
                f"ShardMeta.lookups contains {each!r}, which names no field of the model's own table.",
                hint=f"Use Lookup(name) or the name of one of {names!r}.",
                obj=model,
                id="sharded_orm_lookups.E001",
            )
    if any(lookup.table_name is None for lookup in lookups_of(model)):
        yield from _check_file(model)
    for lookup in lookups_of(model):
        if lookup.problem is not None:
            yield checks.Error(
                f"The lookup by {lookup.field.name!r} {lookup.problem}.",
                hint="Remove it from ShardMeta.lookups, or change the field.",
                obj=model,
                id="sharded_orm_lookups.E002",
            )
            continue
        collations = features_of(connections[lookup.options.group]).collations
        if (collation := declared_inexact(lookup, collations)) is not None:
            yield checks.Error(
                f"The lookup by {lookup.field.name!r} compares text exactly, and the collation"
                f" {collation!r} does not.",
                hint="Declare the field as an ExactCharField"
                f", or with db_collation={collations.exact_for_shard_key!r}. Text that differs in"
                " case only, such as addresses, is to be saved in one form.",
                obj=lookup.field,
                id="sharded_orm_lookups.E003",
            )


def _check_file(model: Any) -> Iterator[checks.CheckMessage]:
    if features_of(connections[DEFAULT_DB_ALIAS]).has_one_writer:
        yield checks.Warning(
            "The entries of lookups are in the SQLite file of the global database. Inside atomic() on it,"
            " as in each change by the admin and with ATOMIC_REQUESTS, values of lookups cannot be written.",
            hint="Give the lookups a table in other files: Lookup(…, table=…).",
            obj=model,
            id="sharded_orm_lookups.W004",
        )
