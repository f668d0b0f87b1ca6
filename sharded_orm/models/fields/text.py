"""A text field that the database compares exactly, by all characters."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper

from sharded_orm.backends.features import features_of


def exact_collation(connection: BaseDatabaseWrapper) -> str | None:
    """Return the collation that compares all characters, even trailing spaces; None for the default one.

    None means that the database's default is used. That is exact on SQLite, and always on
    PostgreSQL. MySQL has an exact collation from 8.0.17 on.
    """
    return features_of(connection).collations.exact_collation(connection)


class ExactCharField(models.CharField):  # type: ignore[type-arg]  # not generic at run time
    """A ``CharField`` for which ``Ada``, ``ada`` and ``Ada `` differ on every database.

    It is meant for shard keys. ``db_collation`` of a plain ``CharField`` has the same effect, but
    needs the name of a collation, which only one kind of database knows.
    """

    description = "Text (up to %(max_length)s), compared exactly"

    def deconstruct(self) -> Any:
        name, _, args, kwargs = super().deconstruct()
        # Migrations name this path, so it stays the same if the class moves to another module.
        return name, "sharded_orm.models.fields.ExactCharField", args, kwargs

    def db_parameters(self, connection: BaseDatabaseWrapper) -> Any:
        # Overrides CharField.db_parameters. Django reads it to create or alter the column of this field, and
        # the column of a foreign key to this field.
        parameters: dict[str, Any] = dict(super().db_parameters(connection))
        return {**parameters, "collation": parameters["collation"] or exact_collation(connection)}
