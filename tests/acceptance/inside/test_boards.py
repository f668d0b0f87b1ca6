"""Boards and pins: their pages, who may change them, and the shards that they ask."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.test import Client

from testproject.boards.forms import BoardForm
from testproject.boards.models import Board, BoardPins, Pin, member_of, new_board, pin_photo
from testproject.boards.views import PER_PAGE
from testproject.photos.models import Photo
from tests.acceptance.inside.pages import token

pytestmark = pytest.mark.django_db(
    databases=[
        "default",
        "directory",
        "tickets_1",
        "tickets_2",
        "photos",
        "addresses",
        "boards",
        "ratings",
    ]
)


@pytest.fixture
def board(ada: Any) -> Board:
    return new_board(member_of(ada), "Walls <of> my room", "Large ones")


def notes(page: Any) -> list[str]:
    return [pin["row"].note for pin in page.context["pins"]]


def test_boards_of_everybody_and_of_a_user(
    browser: Client, ada: Any, bela: Any, board: Board
) -> None:
    other = new_board(member_of(bela), "Blue hours")
    assert board._state.db == board.member._state.db
    front = browser.get("/boards/")
    assert [row["row"] for row in front.context["boards"]] == [other, board]
    assert "Walls &lt;of&gt; my room" in front.content.decode()
    assert [row["row"] for row in browser.get("/boards/of/ada/").context["boards"]] == [board]
    assert browser.get("/boards/of/nobody/").status_code == 404


def test_pages_of_pins(browser: Client, board: Board, dunes: Photo) -> None:
    for number in range(PER_PAGE + 2):
        pin_photo(board, dunes.photo_id, str(number))
    first = browser.get(board.get_absolute_url())
    older = re.search(r'rel="next" href="([^"]+)"', first.content.decode())
    assert older
    pin_photo(board, dunes.photo_id, "new")  # The second page goes on where the first one ended.
    second = browser.get(f"{board.get_absolute_url()}{older[1]}")
    assert [*notes(first), *notes(second)] == [str(n) for n in range(PER_PAGE + 1, -1, -1)]
    assert notes(browser.get(f"{board.get_absolute_url()}?after=x"))[0] == "new"


def test_a_photo_that_is_gone(browser: Client, board: Board, dunes: Photo) -> None:
    pin_photo(board, dunes.photo_id, "sand")
    assert "sand" in browser.get(board.get_absolute_url()).content.decode()
    dunes.delete()
    assert "This photo is gone" in browser.get(board.get_absolute_url()).content.decode()


def test_pin_and_remove(as_bela: Client, bela: Any, dunes: Photo) -> None:
    address = f"/boards/pin/{dunes.photo_id}/"
    assert address in as_bela.get(dunes.get_absolute_url()).content.decode()
    form = {"csrfmiddlewaretoken": token(as_bela, address), "note": "Look"}
    assert "Choose a board" in as_bela.post(address, form).content.decode()
    where = as_bela.post(address, {**form, "new_board": "Sand"}).headers["Location"]
    page = as_bela.get(where)
    assert notes(page) == ["Look"]
    (pin,) = page.context["page"]
    assert pin._state.db == page.context["board"]._state.db == member_of(bela)._state.db
    assert page.context["board"].cover == dunes.photo_id
    as_bela.post(address, {**form, "board": pin.board_id, "note": "Again"})
    assert notes(as_bela.get(where)) == ["Again", "Look"]
    as_bela.post(f"/boards/pins/{pin.pk}/remove/", form)
    assert notes(as_bela.get(where)) == ["Again"]
    assert not Pin.objects.get_many([pin.pk])
    assert BoardPins.objects.count(pin.board_id) == 1


def test_two_windows_do_not_overwrite_each_other(as_bela: Client, bela: Any) -> None:
    mine = new_board(member_of(bela), "Old")
    address = f"{mine.get_absolute_url()}edit/"
    seen = as_bela.get(address).context["form"]["object_version"].value()
    form = {"csrfmiddlewaretoken": token(as_bela, address), "object_version": seen}
    assert as_bela.post(address, {**form, "title": "New"}).status_code == 302
    assert "Somebody else" in as_bela.post(address, {**form, "title": "x"}).content.decode()
    assert Board.objects.get(mine.pk).title == "New"


def test_a_change_between_the_check_and_the_save(
    as_bela: Client, bela: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = new_board(member_of(bela), "Old")
    address = f"{mine.get_absolute_url()}edit/"
    seen = as_bela.get(address).context["form"]["object_version"].value()
    form = {"csrfmiddlewaretoken": token(as_bela, address), "object_version": seen, "title": "x"}
    check = BoardForm.is_valid

    def check_and_lose(form: BoardForm) -> bool:
        is_valid = check(form)
        with mine.edit():
            mine.title = "of somebody else"
        return is_valid

    monkeypatch.setattr(BoardForm, "is_valid", check_and_lose)
    answer = as_bela.post(address, form)
    assert answer.status_code == 200
    assert "Somebody else" in answer.content.decode() and 'value="x"' in answer.content.decode()
    assert Board.objects.get(mine.pk).title == "of somebody else"


def test_what_others_may_not_do(
    browser: Client, as_bela: Client, board: Board, dunes: Photo
) -> None:
    pin = pin_photo(board, dunes.photo_id)
    form = {"csrfmiddlewaretoken": token(as_bela, f"/boards/pin/{dunes.photo_id}/")}
    assert as_bela.get(f"{board.get_absolute_url()}edit/").status_code == 404
    assert as_bela.post(f"/boards/pins/{pin.pk}/remove/", form).status_code == 404
    assert browser.get(f"/boards/pin/{dunes.photo_id}/").status_code == 302
    # A board of somebody else is no choice.
    given = {**form, "board": board.pk}
    assert as_bela.post(f"/boards/pin/{dunes.photo_id}/", given).status_code == 200
    assert BoardPins.objects.count(board) == 1


def test_the_board_of_a_member_who_is_gone(
    as_bela: Client, bela: Any, board: Board, dunes: Photo
) -> None:
    mine = new_board(member_of(bela), "Mine")
    pin = pin_photo(mine, dunes.photo_id)
    form = {"csrfmiddlewaretoken": token(as_bela, f"/boards/pin/{dunes.photo_id}/")}
    mine.member.delete()
    assert as_bela.get(mine.get_absolute_url()).status_code == 404
    assert as_bela.get(f"{mine.get_absolute_url()}edit/").status_code == 404
    assert as_bela.post(f"/boards/pins/{pin.pk}/remove/", form).status_code == 404
    assert [row["row"] for row in as_bela.get("/boards/").context["boards"]] == [board]
    assert as_bela.get("/boards/of/bela/").context["boards"] == []
    # The next pin makes a new member, who does not have the boards of the former one.
    page = as_bela.post(f"/boards/pin/{dunes.photo_id}/", {**form, "new_board": "New"})
    assert as_bela.get(page.headers["Location"]).status_code == 200
    assert as_bela.get(mine.get_absolute_url()).status_code == 404


@pytest.mark.parametrize("kind", ["pin", "nothing", "no shard"])
def test_ids_of_no_board(browser: Client, board: Board, dunes: Photo, kind: str) -> None:
    pk = {
        "pin": pin_photo(board, dunes.photo_id).pk,
        "nothing": board.pk + 1,
        "no shard": board.pk | 500 << 46,
    }[kind]
    assert browser.get(f"/boards/{pk}/").status_code == 404
