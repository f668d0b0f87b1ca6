"""Fields whose value comes from an id generator."""

from __future__ import annotations

from sharded_orm.models.fields.packed import PackedIDField
from sharded_orm.models.fields.tickets import TicketField
from sharded_orm.models.fields.timestamped import TimestampedIDField

__all__ = ["PackedIDField", "TicketField", "TimestampedIDField"]
