"""Objects and mappings. Types 21 to 25 of the group ``pins``."""

from __future__ import annotations

from sharded_orm.contrib.objects import Mapping, ShardedObject, fields


class Board(ShardedObject):
    name = fields.Text()

    class ObjectMeta:
        group = "pins"
        type_id = 21


class Pin(ShardedObject):
    board = fields.Ref(Board)
    note = fields.Text(default="")
    link = fields.URL(null=True)

    class ObjectMeta:
        group = "pins"
        type_id = 22


class BoardPins(Mapping):
    source, target = Board, Pin
