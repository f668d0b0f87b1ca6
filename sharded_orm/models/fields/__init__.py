"""Model fields for generated ids, and for shard keys that are text."""

from __future__ import annotations

from sharded_orm.models.fields.packed import PackedIDField
from sharded_orm.models.fields.text import ExactCharField
from sharded_orm.models.fields.tickets import TicketField
from sharded_orm.models.fields.timestamped import TimestampedIDField

__all__ = ["ExactCharField", "PackedIDField", "TicketField", "TimestampedIDField"]
