"""A field for ids from ticket servers: databases that generate the ids for all shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.db import models

from sharded_orm import runtime
from sharded_orm.conf import MAX_TICKETS
from sharded_orm.models.fields.generic_fields import BigIntegerField
from sharded_orm.models.fields.read_only_id import ReadOnlyIDMixin


class TicketField(ReadOnlyIDMixin, BigIntegerField):
    """A 64-bit id that a ticket server generates before the insert (Flickr, F1-F5; Yupoo, Y8).

    A ticket server is a database that generates the ids for all shards, so each id is unique over
    all shards.

    :param sequence: the name of the counter on the ticket servers; by default the table's name.
    :param editable: True if serializers of Django REST framework should accept an id.

    If a row has an id already, it keeps the id. ``bulk_create()`` fetches the ids of up to a
    million rows with one request. The ids of rows that are rolled back are lost, and never used
    again.
    """

    description = "64-bit id from a ticket server"
    unique_over_shards = True

    def __init__(self, *args: Any, sequence: str | None = None, **kwargs: Any) -> None:
        self.sequence = sequence
        super().__init__(*args, **kwargs)

    def deconstruct(self) -> Any:
        name, _, args, kwargs = super().deconstruct()
        if self.sequence is not None:
            kwargs["sequence"] = self.sequence
        # Migrations contain this import path, so it must stay valid if the class moves elsewhere.
        return name, "sharded_orm.models.fields.TicketField", args, kwargs

    @property
    def sequence_name(self) -> str:
        return self.sequence or self.model._meta.db_table

    def get_pk_value_on_save(self, instance: models.Model) -> int:
        return runtime.tickets().next(self.sequence_name)

    def pre_save(self, model_instance: models.Model, add: bool) -> Any:
        value = getattr(model_instance, self.attname)
        if value is None and add:
            value = runtime.tickets().next(self.sequence_name)
            setattr(model_instance, self.attname, value)
        return value

    def fill_many(self, instances: Sequence[models.Model]) -> None:
        """Set an id on each instance that has none.

        Sends one request to a ticket server per million ids.
        """
        new = [i for i in instances if getattr(i, self.attname) is None]
        for start in range(0, len(new), MAX_TICKETS):
            batch = new[start : start + MAX_TICKETS]
            ids = runtime.tickets().take(self.sequence_name, len(batch))
            for instance, value in zip(batch, ids, strict=True):
                setattr(instance, self.attname, value)

    def validate(self, value: Any, model_instance: models.Model | None) -> None:
        # Allow an empty id, as an AutoField does, because the ticket server generates the id when
        # the row is saved.
        if value is not None:
            super().validate(value, model_instance)
