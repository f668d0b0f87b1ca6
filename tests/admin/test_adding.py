"""The add page: it asks for the key first if the form depends on it; the key places the row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client

from sharded_orm import runtime
from sharded_orm.admin import ShardedModelAdmin
from tests.admin.conftest import (
    DATABASES,
    NEAR,
    ONE,
    SHARD,
    TWO,
    UNPLACED,
    Rows,
    inline,
    object_id_by_hand,
    url,
)
from tests.photos.models import Album, Board, Comment, Event, Note, Person, Photo, Pin, Save, Visit

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.long_on("mysql", "postgresql"),
    pytest.mark.django_db(databases=DATABASES),
    pytest.mark.urls("tests.admin.site"),
]


def photo(**values: Any) -> dict[str, Any]:
    blank = dict.fromkeys(("album", "posted_at_0", "posted_at_1", "stars", "price"), "")
    return {**blank, "title": "new", **inline("comments"), **values}


def test_the_key_is_asked_for_first(admin_client: Client, rows: Rows) -> None:
    response = admin_client.get(url(Photo, "add"))
    assert response.templates[0].name == "admin/sharded_orm/add_key.html"
    assert 'name="_key"' in response.content.decode()


def test_the_question_keeps_what_the_url_says(admin_client: Client, rows: Rows) -> None:
    response = admin_client.get(url(Photo, "add", _popup=1, _to_field="photo_id", title="<b>"))
    assert dict(response.context["hidden_inputs"]) == {
        "_popup": "1",
        "_to_field": "photo_id",
        "title": "<b>",
    }
    assert "<b>" not in response.content.decode()


@pytest.mark.parametrize(
    ("key", "problem"), [("x", "number"), ("99999999999999999999999", "value of user id")]
)
def test_a_wrong_key_is_asked_for_again(
    admin_client: Client, rows: Rows, key: str, problem: str
) -> None:
    response = admin_client.get(url(Photo, "add", _key=key))
    assert response.status_code == 200
    assert response.templates[0].name == "admin/sharded_orm/add_key.html"
    assert problem in response.content.decode() + str(response.context["problem"])


def test_somebody_who_does_not_exist_is_asked_for_again(admin_client: Client, rows: Rows) -> None:
    response = admin_client.get(url(Album, "add", _key=987))
    assert response.templates[0].name == "admin/sharded_orm/add_key.html"
    # Without the page that asks for the key: only the form checks a key of the URL.
    response = admin_client.post(url(Album, "add", _key=987), {"title": "x", **inline("photos")})
    assert response.status_code == 200
    assert "owner: " in str(response.context["errors"])
    assert runtime.locate("photos", 987) is None


def test_the_form_has_the_key_as_text(admin_client: Client, rows: Rows) -> None:
    page = admin_client.get(url(Album, "add", _key=ONE)).content.decode()
    assert "person1" in page
    assert 'name="owner"' not in page
    assert "never changes" in page


def test_a_row_is_added_on_the_shard_of_its_key(admin_client: Client, rows: Rows) -> None:
    response = admin_client.post(url(Photo, "add", _key=TWO), photo(album=rows.other_album.pk))
    assert response.status_code == 302, response.context["errors"]
    stored = Photo.objects.using(SHARD[TWO]).get(title="new")
    assert (stored.user_id, stored.album) == (TWO, rows.other_album)
    assert LogEntry.objects.get().object_id == object_id_by_hand(stored)


def test_the_first_row_of_a_key_places_it(admin_client: Client, rows: Rows) -> None:
    page = admin_client.get(url(Photo, "add", _key=UNPLACED)).content.decode()
    assert "gets a shard when the row is saved" in page
    response = admin_client.post(url(Photo, "add", _key=UNPLACED), photo())
    assert response.status_code == 302, response.context["errors"]
    home = runtime.locate("photos", UNPLACED)
    assert home is not None
    assert Photo.objects.using(home.alias).get(title="new").user_id == UNPLACED


def test_a_form_that_is_wrong_places_nothing(admin_client: Client, rows: Rows) -> None:
    response = admin_client.post(url(Photo, "add", _key=UNPLACED), photo(title=""))
    assert response.status_code == 200
    assert runtime.locate("photos", UNPLACED) is None


def test_another_key_than_the_page_s_is_refused(admin_client: Client, rows: Rows) -> None:
    for value in (str(TWO), str(NEAR), "x", ""):
        response = admin_client.post(url(Photo, "add", _key=ONE), photo(user_id=value))
        assert response.status_code == 200, value
        assert "cannot be changed here" in str(response.context["errors"])
    assert not Photo.objects.filter(title="new").scatter().exists()


def test_a_row_of_another_shard_is_no_choice(admin_client: Client, rows: Rows) -> None:
    response = admin_client.post(url(Photo, "add", _key=ONE), photo(album=rows.other_album.pk))
    assert "Select a valid choice" in str(response.context["errors"])
    response = admin_client.post(url(Photo, "add", _key=ONE), photo(tags=[rows.tag.pk, 999]))
    assert "not one of the available choices" in str(response.context["errors"])
    response = admin_client.post(url(Photo, "add", _key=UNPLACED), photo(album=rows.album.pk))
    assert "Select a valid choice" in str(response.context["errors"])


def test_an_initial_value_will_do_for_the_question(admin_client: Client, rows: Rows) -> None:
    response = admin_client.get(url(Album, "add", owner=TWO, title="Spring"))
    assert response.context["adminform"].form.initial["title"] == "Spring"
    assert response.context["shard"].alias == SHARD[TWO]


def test_the_key_of_the_changelist_is_that_of_the_row(admin_client: Client, rows: Rows) -> None:
    response = admin_client.get(url(Album, "add", _changelist_filters=f"_key={TWO}"))
    assert response.context["shard"].alias == SHARD[TWO]
    # The form's action must repeat the parameters: Django's form leaves them out.
    response = admin_client.post(
        url(Album, "add", _changelist_filters=f"_key={TWO}"), {"title": "new", **inline("photos")}
    )
    assert Album.objects.get(owner=TWO, title="new")._state.db == SHARD[TWO]


def test_a_key_of_another_shard_than_the_popup_s(admin_client: Client, rows: Rows) -> None:
    response = admin_client.get(url(Album, "add", _shard=SHARD[ONE], _key=TWO, _popup=1))
    assert response.templates[0].name == "admin/sharded_orm/add_key.html"
    assert f"not on {SHARD[ONE]}" in response.content.decode()


def test_the_key_is_a_field_where_nothing_depends_on_it(admin_client: Client, placed: None) -> None:
    assert 'name="account"' in admin_client.get(url(Event, "add")).content.decode()
    response = admin_client.post(url(Event, "add"), {"account": "alice", "number": 5})
    assert response.status_code == 302
    event = Event.objects.get(account="alice")
    response = admin_client.post(
        url(Event, "change", f"alice~{event.pk}"), {"account": "bob", "number": 6}
    )
    assert "cannot be changed here" in str(response.context["errors"])
    event.refresh_from_db()
    assert event.number == 5


def test_a_key_that_is_the_primary_key(admin_client: Client, placed: None) -> None:
    number = 5 << 46 | 7  # on shard 5
    home = runtime.locate("pins", number)
    assert home is not None
    response = admin_client.post(url(Pin, "add"), {"id": number, "note": "n"})
    assert response.status_code == 302
    assert Pin.objects.using(home.alias).get(pk=number).note == "n"
    response = admin_client.post(url(Pin, "change", str(number)), {"note": "m"})
    assert response.status_code == 302
    assert Pin.objects.get(pk=number).note == "m"


def test_a_key_that_is_made_is_on_the_shard_that_is_looked_at(
    admin_client: Client, placed: None
) -> None:
    response = admin_client.post(url(Note, "add", _shard="pins_00005"), {"text": "t", "board": ""})
    assert response.status_code == 302, response.context["errors"]
    [note] = Note.objects.using("pins_00005")
    assert LogEntry.objects.get().object_id == str(note.pk)


def test_a_form_with_pickers_draws_a_shard(admin_client: Client, placed: None) -> None:
    response = admin_client.get(url(Note, "add", _popup=1))
    assert response.status_code == 302
    assert "_shard=pins_" in response.url
    assert "_popup=1" in response.url
    assert admin_client.get(response.url).status_code == 200


def test_a_shard_that_is_closed_gets_no_row_that_may_go_anywhere(
    admin_client: Client, placed: None
) -> None:
    before = runtime.topology()
    closed, opened = before.groups["pins"].ranges
    ranges = (replace(closed, open=False), opened)
    pins = replace(before.groups["pins"], ranges=ranges)
    runtime.swap(replace(before, groups={**before.groups, "pins": pins}))
    try:
        response = admin_client.get(url(Note, "add", _shard="pins_00001"), follow=True)
        assert response.context["shard"].number >= opened.first
        [message] = response.context["messages"]
        assert str(message).startswith("pins_00001 takes no new rows")
        admin_client.post(url(Note, "add", _shard="pins_00001"), {"text": "t", "board": ""})
    finally:
        runtime.swap(before)
    [note] = Note.objects.scatter()
    assert note._state.db >= runtime.shard("pins", opened.first).alias


def test_a_row_beside_another(admin_client: Client, placed: None) -> None:
    board = Board.objects.create(name="b")
    alias = board._state.db
    response = admin_client.post(url(Note, "add", _shard=alias), {"text": "t", "board": board.pk})
    assert response.status_code == 302, response.context["errors"]
    assert Note.objects.using(alias).get().board == board
    response = admin_client.get(url(Save, "add"))
    assert response.templates[0].name == "admin/sharded_orm/add_key.html"
    assert admin_client.get(url(Save, "add", _key=board.pk)).context["shard"].alias == alias
    response = admin_client.post(url(Save, "add", _key=board.pk), {"note": "s"})
    assert response.status_code == 302, response.context["errors"]
    assert Save.objects.using(alias).get().board == board
    response = admin_client.post(url(Save, "add", _key=board.pk + 1), {"note": "s"})
    assert "is not a valid choice" in str(response.context["errors"])


def test_a_key_that_is_made_goes_anywhere(admin_client: Client, placed: None) -> None:
    response = admin_client.post(url(Visit, "add"), {"page": "/"})
    assert response.status_code == 302, response.context["errors"]
    assert Visit.objects.scatter().get().page == "/"


def test_save_as_new_has_the_key_of_the_original(admin_client: Client, rows: Rows) -> None:
    data = {
        "title": "copy",
        "_saveasnew": "1",
        **inline("photos", {"photo_id": rows.other_photo.pk, "title": "its photo"}, initial=1),
    }
    response = admin_client.post(url(Album, "change", object_id_by_hand(rows.other_album)), data)
    assert response.status_code == 302, response.context["errors"]
    copy = Album.objects.get(owner=TWO, title="copy")
    assert copy._state.db == SHARD[TWO]
    assert copy.pk != rows.other_album.pk
    assert [photo.user_id for photo in copy.photos.all()] == [TWO]
    assert rows.other_album.photos.count() == 1
    assert response.url.startswith(url(Album, "change", object_id_by_hand(copy)))
    assert LogEntry.objects.get().object_id == object_id_by_hand(copy)


def test_save_as_new_of_a_row_that_is_gone(admin_client: Client, rows: Rows) -> None:
    address = url(Album, "change", f"{ONE}~12345")
    assert admin_client.post(address, {"title": "copy", "_saveasnew": "1"}).status_code == 404


@pytest.mark.parametrize("button", ["_save", "_continue", "_addanother"])
def test_where_the_buttons_lead(admin_client: Client, rows: Rows, button: str) -> None:
    address = url(Photo, "add", _key=TWO, _changelist_filters=f"_shard={SHARD[TWO]}")
    response = admin_client.post(address, photo(**{button: "1"}), follow=True)
    assert response.status_code == 200
    added = Photo.objects.get(user_id=TWO, title="new")
    [message] = response.context["messages"]
    assert url(Photo, "change", object_id_by_hand(added)) in str(message)
    path = response.redirect_chain[-1][0]
    if button == "_save":
        assert path == url(Photo, "changelist", _shard=SHARD[TWO])
    elif button == "_continue":
        assert path.startswith(url(Photo, "change", object_id_by_hand(added)))
    else:
        assert response.context["shard"].alias == SHARD[TWO]


def test_people_stay_in_the_global_database(admin_client: Client, placed: None) -> None:
    response = admin_client.post(url(Person, "add"), {"username": "new", **inline("albums")})
    assert response.status_code == 302
    assert Person.objects.get(username="new")._state.db == "default"


def test_a_comment_needs_its_photo_s_shard(admin_client: Client, rows: Rows) -> None:
    data = {"photo": rows.photo.pk, "author": TWO, "text": "hello"}
    assert admin_client.post(url(Comment, "add", _key=ONE), data).status_code == 302
    response = admin_client.post(url(Comment, "add", _key=TWO), data)
    assert "Select a valid choice" in str(response.context["errors"])


def test_if_no_node_can_be_reached_the_page_of_a_new_row_says_so(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = OSError(2002, "no route for 'secret'@'host'")
    monkeypatch.setattr(runtime.strategy("pins"), "node_failure", lambda shard: failure)
    # The form of a note needs a shard, since it offers boards. A board gets its shard when it is saved.
    for response in (
        admin_client.get(url(Note, "add")),
        admin_client.post(url(Board, "add"), {"name": "b"}),
    ):
        assert response.status_code == 503
        content = response.content.decode()
        assert "No new row can be stored" in content
        assert "no route" in content and "secret" not in content
    assert not Board.objects.scatter().exists()


@pytest.mark.parametrize("model", [Board, Note, Visit])
@pytest.mark.parametrize(
    "query", [{"_key": "x"}, {"_key": "9" * 30}, {"_shard": "photos_00003"}, {"_shard": "\0"}]
)
def test_a_place_that_there_is_not_for_a_key_that_is_made(
    admin_client: Client, placed: None, model: Any, query: dict[str, str]
) -> None:
    for ask in (admin_client.get, admin_client.post):
        response = ask(url(model, "add", **query))
        assert response.status_code == 200
        assert response.templates[0].name == "admin/sharded_orm/no_changelist.html"
    assert not model.objects.scatter().exists()


def test_no_shard_is_promised_to_a_row_whose_key_is_typed(
    admin_client: Client, placed: None
) -> None:
    response = admin_client.get(url(Event, "add", _shard="events_00002"))
    assert "The new row will be on" not in response.content.decode()
    response = admin_client.get(url(Visit, "add", _shard="visits_00002"))
    assert "<strong>visits_00002</strong>" in response.content.decode()
    response = admin_client.get(url(Event, "add", _key="alice"))
    assert "The new row will be on" in response.content.decode()


@pytest.mark.parametrize("album", ["9" * 30, "-" + "9" * 30, "x", "7~9", "\0"])
def test_initial_values_that_no_row_has(admin_client: Client, rows: Rows, album: str) -> None:
    response = admin_client.get(
        url(Photo, "add", _key=ONE, album=album, tags=f"{rows.tag.pk},{album}")
    )
    assert response.status_code == 200
    assert "album" not in response.context["adminform"].form.initial
    assert response.context["adminform"].form.initial["tags"] == [str(rows.tag.pk)]
    response = admin_client.post(url(Photo, "add", _key=ONE), photo(album=album, tags=[album]))
    assert response.status_code == 200
    assert len(response.context["errors"]) == 2


def test_a_key_that_is_shown_only_is_asked_for(
    admin_client: Client, placed: None, register: Any
) -> None:
    register(Event, type("Events", (ShardedModelAdmin,), {"readonly_fields": ["account"]}))
    response = admin_client.get(url(Event, "add"))
    assert response.templates[0].name == "admin/sharded_orm/add_key.html"
    assert admin_client.post(url(Event, "add", _key="alice"), {"number": 1}).status_code == 302
    assert Event.objects.get(account="alice").number == 1
