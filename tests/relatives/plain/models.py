"""The models in one plain database."""

from __future__ import annotations

from tests.relatives import fields


class Agent(fields.AgentFields):
    pass


class City(fields.Named):
    pass


class Shelf(fields.ShelfFields):
    pass


class Label(fields.LabelFields):
    pass


class Item(fields.ItemFields):
    pass


class Passport(fields.PassportFields):
    pass


class Badge(fields.BadgeFields):
    pass


class Cover(fields.CoverFields):
    pass


class Note(fields.NoteFields):
    pass


class Memo(fields.NoteFields):
    pass
