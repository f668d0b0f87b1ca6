"""Text whose values are equal in the database only if they are the same text."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper

from sharded_orm.backends.features import features_of


def exact_collation(connection: BaseDatabaseWrapper) -> str | None:
    """The collation that compares all characters, even trailing spaces; None for the default.

    MySQL has it from 8.0.17 on. The default collation is exact on SQLite, and always on
    PostgreSQL.
    """
    return features_of(connection).collations.exact_collation(connection)


class ExactCharField(models.CharField):  # type: ignore[type-arg]  # not generic at run time
    """A ``CharField`` for which ``Ada``, ``ada`` and ``Ada `` differ on every database.

    For shard keys. ``db_collation`` has the same effect, but needs a name that only one kind of
    database knows.
    """

    description = "Text (up to %(max_length)s), compared exactly"

    def deconstruct(self) -> Any:
        name, _, args, kwargs = super().deconstruct()
        # The path that migrations name, whatever module this is.
        return name, "sharded_orm.models.fields.ExactCharField", args, kwargs

    def db_parameters(self, connection: BaseDatabaseWrapper) -> Any:
        # Overrides CharField.db_parameters, which Django reads to create or alter a column, also
        # that of a foreign key to this field.
        parameters: dict[str, Any] = dict(super().db_parameters(connection))
        return {**parameters, "collation": parameters["collation"] or exact_collation(connection)}
