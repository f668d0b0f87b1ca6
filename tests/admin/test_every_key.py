"""Lists, actions and deletions of models with every kind of key and id."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client

from sharded_orm import runtime
from tests.admin.conftest import DATABASES, ONE, url
from tests.admin.test_actions import reports
from tests.photos.models import (
    Album,
    Board,
    Event,
    Like,
    Note,
    Pin,
    Reading,
    Save,
    Story,
    Tag,
    Tick,
    Visit,
)

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES),
    pytest.mark.urls("tests.admin.site"),
]


def made(model: type[Any]) -> Any:
    """A stored row."""
    if model is Album:
        return Album.objects.create(owner_id=ONE, title="a")
    if model is Pin:
        return Pin.objects.create(id=3 << runtime.strategy("pins").embedded[0], note="p")  # type: ignore[index]
    values: dict[Any, Any] = {
        Tag: {"user_id": ONE, "name": "a~b%c"},
        Event: {"account": "a~b%/?&é ", "number": 1},
        Reading: {"sensor": 1500, "value": 1.5},
        Board: {"name": "b"},
        Visit: {"page": "p"},
        Story: {"author": 7, "text": "s"},
        Note: {"text": "n"},
    }
    if model in values:
        return model.objects.create(**values[model])
    if model is Tick:
        return Tick.objects.create(visit=made(Visit))
    return model.objects.create(board=made(Board), **({"note": "s"} if model is Save else {}))


MODELS = [Album, Tag, Event, Reading, Pin, Board, Save, Like, Visit, Tick, Story, Note]


@pytest.mark.parametrize("model", MODELS)
def test_found_and_deleted(browser: Client, placed: None, model: type[Any]) -> None:
    row, other = made(model), None
    options = row._shard_options()
    places: list[dict[str, Any]] = [
        {},
        {"_shard": row._state.db},
        {"_key": options.key_of(row)},
    ]
    for place in places:
        response = browser.get(url(model, "changelist", **place))
        assert response.status_code == 200
        cl = response.context["cl"]
        assert list(cl.result_list) == [row], place
        link = cl.url_for_result(row)
        assert browser.get(link).context["original"].pk
        if place:
            continue
        # What the list's checkbox holds, posted, and the same once confirmed.
        page = response.content.decode()
        name = page.split('name="_selected_action" value="')[1].split('"')[0]
        assert "&" not in name or model is Event
        other = name.replace("&amp;", "&")
    data = {"action": "delete_selected", "_selected_action": [other]}
    page = browser.post(url(model, "changelist"), {**data, "index": 0})
    (deletion,) = page.context["deletions"]
    assert (deletion.shard.alias, deletion.part.count) == (row._state.db, 1)
    response = browser.post(url(model, "changelist"), {**data, "post": "yes"})
    assert reports(response)[0].startswith("success: Deleted")
    assert not model.objects.using(row._state.db).exists()


@pytest.mark.parametrize("model", MODELS)
def test_the_page_that_deletes_it(browser: Client, placed: None, model: type[Any]) -> None:
    row = made(model)
    cl = browser.get(url(model, "changelist", _shard=row._state.db)).context["cl"]
    delete = cl.url_for_result(row).replace("/change/", "/delete/")
    response = browser.get(delete)
    assert row._state.db in response.content.decode()
    assert browser.post(delete, {"post": "yes"}).status_code == 302
    assert not model.objects.using(row._state.db).exists()
