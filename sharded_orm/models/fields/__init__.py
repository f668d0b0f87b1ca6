"""Fields whose value comes from an id generator."""

from __future__ import annotations

from sharded_orm.models.fields.tickets import TicketField

__all__ = ["TicketField"]
