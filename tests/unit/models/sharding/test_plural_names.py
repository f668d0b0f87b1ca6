"""The plural of the names of mappings and tables of lookups."""

from __future__ import annotations

import pytest
from django.db.migrations.state import ModelState

from sharded_orm.models.sharding.plural_names import plural_of, set_plural
from tests.finders.models import EmailEntry
from tests.pinboards.models import Board, BoardPins, FacebookUsers, Follows


@pytest.mark.parametrize(
    ("name", "plural"),
    [
        ("board pins", "board pins"),
        ("photo address", "photo addresses"),
        ("members by user", "members by user"),
        ("member by user", "members by user"),
        ("email entry", "email entries"),
        ("birthday", "birthdays"),
        ("postbox", "postboxes"),
        ("email", "emails"),
    ],
)
def test_plurals(name: str, plural: str) -> None:
    assert plural_of(name) == plural


def test_generated_tables_have_a_plural() -> None:
    plurals = {
        model: str(model._meta.verbose_name_plural)
        for model in (BoardPins, Follows, FacebookUsers, EmailEntry, Board)
    }
    assert plurals == {
        BoardPins: "board pins",
        Follows: "follows",
        FacebookUsers: "facebook users",
        EmailEntry: "email entries",
        Board: "boards",
    }


def test_a_plural_needs_no_migration() -> None:
    for model in (BoardPins, EmailEntry):
        assert "verbose_name_plural" not in ModelState.from_model(model).options


@pytest.mark.parametrize("option", ["verbose_name", "verbose_name_plural"])
def test_a_name_in_meta_is_kept(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BoardPins._meta.original_attrs, option, "pin")
    monkeypatch.setattr(BoardPins._meta, "verbose_name_plural", "pinss")
    set_plural(BoardPins)
    assert BoardPins._meta.verbose_name_plural == "pinss"
