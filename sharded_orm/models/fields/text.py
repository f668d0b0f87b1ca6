"""A text field whose values the database compares exactly, character by character."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper

from sharded_orm.backends.features import features_of


def exact_collation(connection: BaseDatabaseWrapper) -> str | None:
    """Return the name of a collation that compares texts exactly, including trailing spaces.

    Return None on SQLite and PostgreSQL, because their default collation is exact. The collation
    returned for MySQL exists since MySQL 8.0.17.
    """
    return features_of(connection).collations.exact_collation(connection)


class ExactCharField(models.CharField):  # type: ignore[type-arg]  # the class is not generic at run time
    """A ``CharField`` for which ``Ada``, ``ada`` and ``Ada `` differ on every database.

    The field is meant for shard keys. A plain ``CharField`` with ``db_collation`` can do the same,
    but the name of the collation differs between databases.
    """

    description = "Text (up to %(max_length)s), compared exactly"

    def deconstruct(self) -> Any:
        name, _, args, kwargs = super().deconstruct()
        # Migrations contain this import path, so it must stay valid if the class moves elsewhere.
        return name, "sharded_orm.models.fields.ExactCharField", args, kwargs

    def db_parameters(self, connection: BaseDatabaseWrapper) -> Any:
        # Overrides CharField.db_parameters(), which Django calls to create or alter this field's
        # column, and the column of a foreign key to this field.
        parameters: dict[str, Any] = dict(super().db_parameters(connection))
        return {**parameters, "collation": parameters["collation"] or exact_collation(connection)}
