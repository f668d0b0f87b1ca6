from __future__ import annotations

import pytest

from tests.pinboards.models import Board, BoardPins, Pin

DATABASES = ["default", "directory", "pins"]

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]


def test_declare_create_get_and_page() -> None:
    board = Board.objects.create(name="Cats")
    pins = [Pin.objects.create(near=board, board=board, note=str(n)) for n in range(7)]
    for pin in pins:
        BoardPins.objects.add(board, pin)
    assert {pin._state.db for pin in pins} == {board._state.db}
    pin = Pin.objects.get(pins[3].pk)
    assert (pin.note, pin.board, pin.link) == ("3", board, None)
    first = BoardPins.objects.page(board, size=4)
    assert first.objects == pins[:4]
    pins[4].delete()
    second = BoardPins.objects.page(board, after=str(first.next), size=4)
    assert (second.objects, second.next) == (pins[5:], None)
    with pin.edit():
        pin.note = "new"
    assert Pin.objects.get(pin.pk).note == "new"
