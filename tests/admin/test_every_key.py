"""Lists, actions and deletions of models with every kind of key and id."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client

from sharded_orm import runtime
from tests.admin.conftest import DATABASES, ONE, url
from tests.admin.test_actions import message_texts
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


def create(model: type[Any]) -> Any:
    """Create a row of ``model``."""
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
        return Tick.objects.create(visit=create(Visit))
    return model.objects.create(board=create(Board), **({"note": "s"} if model is Save else {}))


MODELS = [Album, Tag, Event, Reading, Pin, Board, Save, Like, Visit, Tick, Story, Note]


@pytest.mark.parametrize("model", MODELS)
def test_found_and_deleted(admin_client: Client, placed: None, model: type[Any]) -> None:
    row, other = create(model), None
    options = row._shard_options()
    scopes: list[dict[str, Any]] = [
        {},
        {"_shard": row._state.db},
        {"_key": options.key_of(row)},
    ]
    for scope in scopes:
        response = admin_client.get(url(model, "changelist", **scope))
        assert response.status_code == 200
        cl = response.context["cl"]
        assert list(cl.result_list) == [row], scope
        link = cl.url_for_result(row)
        assert admin_client.get(link).context["original"].pk
        if scope:
            continue
        # Post the value of the list's checkbox, and again for the confirmation.
        page = response.content.decode()
        name = page.split('name="_selected_action" value="')[1].split('"')[0]
        assert "&" not in name or model is Event
        other = name.replace("&amp;", "&")
    data = {"action": "delete_selected", "_selected_action": [other]}
    page = admin_client.post(url(model, "changelist"), {**data, "index": 0})
    (deletion,) = page.context["deletions"]
    assert (deletion.shard.alias, deletion.part.count) == (row._state.db, 1)
    response = admin_client.post(url(model, "changelist"), {**data, "post": "yes"})
    assert message_texts(response)[0].startswith("success: Deleted")
    assert not model.objects.using(row._state.db).exists()


@pytest.mark.parametrize("model", MODELS)
def test_the_page_that_deletes_it(admin_client: Client, placed: None, model: type[Any]) -> None:
    row = create(model)
    cl = admin_client.get(url(model, "changelist", _shard=row._state.db)).context["cl"]
    delete = cl.url_for_result(row).replace("/change/", "/delete/")
    response = admin_client.get(delete)
    assert row._state.db in response.content.decode()
    assert admin_client.post(delete, {"post": "yes"}).status_code == 302
    assert not model.objects.using(row._state.db).exists()
