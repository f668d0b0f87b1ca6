"""Text whose values are equal in the database only if they are the same text."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper

from sharded_orm.backends.features import features_of


def exact_collation(connection: BaseDatabaseWrapper) -> str | None:
    """The collation that compares every character, spaces at the end among them; None: the default.

    MySQL has it from 8.0.17 on. The default is exact on SQLite, and on PostgreSQL, where a database
    cannot have another one.
    """
    return features_of(connection).collations.exact_collation(connection)


class ExactCharField(models.CharField):  # type: ignore[type-arg]  # not generic at run time
    """A ``CharField`` that tells ``Ada``, ``ada`` and ``Ada `` apart on every database.

    For shard keys: ``db_collation`` does the same by a name that one database has only.
    """

    description = "Text (up to %(max_length)s), compared exactly"

    def deconstruct(self) -> Any:
        name, _, args, kwargs = super().deconstruct()
        # What migrations name, wherever this module is.
        return name, "sharded_orm.models.fields.ExactCharField", args, kwargs

    def db_parameters(self, connection: BaseDatabaseWrapper) -> Any:
        # Overrides CharField.db_parameters, which is asked by whatever makes or changes a column,
        # also one of a foreign key to this one.
        parameters: dict[str, Any] = dict(super().db_parameters(connection))
        return {**parameters, "collation": parameters["collation"] or exact_collation(connection)}
