"""The activity of users: what they do is found by themselves, and by the owners of the photos."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client

from sharded_orm import runtime
from testproject.activity.models import by_actor, by_receiver, events
from testproject.photos.models import Comment, Photo
from testproject.photos.publication import publish
from tests.acceptance.inside.pages import committed, token

pytestmark = pytest.mark.django_db(
    databases=["default", "directory", "tickets_1", "tickets_2", "photos", "addresses"]
)


def shown(browser: Client, path: str) -> list[str]:
    page = browser.get(path)
    return [event.get("title") or event["text"] for event in page.context["events"]]


@pytest.fixture
def ridge(ada: Any) -> Photo:
    with committed():
        return publish(ada, "Ridge <at> noon", new_album="Up north")


def comment_by(client: Client, photo: Photo, text: str) -> None:
    path = photo.get_absolute_url()
    form = {"text": text, "csrfmiddlewaretoken": token(client, path)}
    with committed():
        assert client.post(path, form).status_code == 302


def test_what_a_user_does_is_found_by_both_sides(
    browser: Client, as_bela: Client, ada: Any, bela: Any, ridge: Photo
) -> None:
    comment_by(as_bela, ridge, "Which <b>one</b>?")
    assert shown(browser, "/photos/ada/activity/") == ["Ridge <at> noon"]
    assert shown(browser, "/photos/bela/activity/") == ["Which <b>one</b>?"]
    assert shown(browser, "/photos/ada/activity/around/") == ["Which <b>one</b>?"]
    assert shown(browser, "/photos/bela/activity/around/") == []
    page = browser.get("/photos/ada/activity/around/").content.decode()
    assert "&lt;b&gt;one" in page and f"{ridge.get_absolute_url()}#comment-" in page
    # The event is on the actor's shard, and each index row is on that of its user.
    (event,) = by_actor.get_all(actor_id=bela.pk)
    assert events.alias_of(event.id, bela.pk) == runtime.place("photos", bela.pk).alias
    row = by_receiver.model.objects.get(receiver_id=ada.pk)
    assert (row._state.db, row.entity_id) == (ridge._state.db, event.id)


def test_a_deleted_comment_is_no_activity(
    browser: Client, as_bela: Client, ada: Any, ridge: Photo
) -> None:
    comment_by(as_bela, ridge, "Late")
    comment = Comment.objects.get(owner=ada)
    browser.force_login(ada)
    with committed():
        browser.post(f"{ridge.get_absolute_url()}comments/{comment.pk}/delete/")
    assert shown(browser, "/photos/bela/activity/") == []
    assert shown(browser, "/photos/ada/activity/around/") == []


def test_older_activity(
    browser: Client, ada: Any, ridge: Photo, monkeypatch: pytest.MonkeyPatch
) -> None:
    with committed():
        publish(ada, "Second", new_album="Up north")
    monkeypatch.setattr("testproject.activity.views.PER_PAGE", 1)
    page = browser.get("/photos/ada/activity/")
    after = page.context["after"]
    assert shown(browser, "/photos/ada/activity/") == ["Second"]
    assert f"?after={after}" in page.content.decode()
    assert shown(browser, f"/photos/ada/activity/?after={after}") == ["Ridge <at> noon"]
    assert browser.get("/photos/ada/activity/?after=nonsense").status_code == 404
    assert browser.get("/photos/nobody/activity/").status_code == 404


def test_whose_account_is_closed_is_not_shown(
    browser: Client, as_bela: Client, ada: Any, bela: Any, ridge: Photo
) -> None:
    comment_by(as_bela, ridge, "First!")
    type(bela).objects.filter(pk=bela.pk).update(is_active=False)
    assert shown(browser, "/photos/ada/activity/around/") == []
    assert browser.get("/photos/bela/activity/").status_code == 404
