"""Pages about shards that do not answer, and about misplaced rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
from django.db import DatabaseError, connections
from django.test import Client

from sharded_orm import runtime
from sharded_orm.admin.failures import cause_of
from tests.admin.conftest import DATABASES, ONE, SHARD, TWO, Rows, object_id_by_hand, url
from tests.admin.test_actions import action_data, message_texts
from tests.admin.test_changelist import node, text, titles
from tests.admin.test_deleting import confirmation
from tests.admin.test_list_editing import list_data
from tests.photos.models import Comment, Photo

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
    pytest.mark.urls("tests.admin.lists"),
]


@pytest.fixture
def broken(rows: Rows) -> Iterator[str]:
    """The shard of TWO has no table of photos."""
    table = Photo._meta.db_table
    with connections[SHARD[TWO]].cursor() as cursor:
        cursor.execute(f"ALTER TABLE {table} RENAME TO {table}_gone")
    yield SHARD[TWO]
    with connections[SHARD[TWO]].cursor() as cursor:
        cursor.execute(f"ALTER TABLE {table}_gone RENAME TO {table}")


@pytest.fixture
def node_down(rows: Rows) -> Iterator[str]:
    """The node of TWO's shard has a closed port."""
    if connections[SHARD[TWO]].vendor == "sqlite":
        pytest.skip("a node of SQLite is a folder")
    before = runtime.topology()
    name = node(SHARD[TWO])
    elsewhere = {**before.nodes[name], "PORT": 1}
    runtime.swap(replace(before, nodes={**before.nodes, name: elsewhere}))
    yield name
    runtime.swap(before)


def test_all_shards_but_the_broken_one(admin_client: Client, broken: str) -> None:
    response = admin_client.get(url(Photo, "changelist", _count=1))
    assert sorted(titles(response)) == ["photo of 1", "photo of 3"]
    page_text = text(response)
    assert "These did not answer. Their rows are missing below:" in page_text
    assert f"{broken} on {node(broken)}: " in page_text
    assert "16 shards on 2 nodes asked" in page_text


@pytest.fixture
def unmigrated(rows: Rows) -> Iterator[None]:
    """No shard has a table of photos."""
    table = Photo._meta.db_table
    aliases = [shard.alias for shard in runtime.group("photos").shards()]
    for alias in aliases:
        with connections[alias].cursor() as cursor:
            cursor.execute(f"ALTER TABLE {table} RENAME TO {table}_gone")
    yield
    for alias in aliases:
        with connections[alias].cursor() as cursor:
            cursor.execute(f"ALTER TABLE {table}_gone RENAME TO {table}")


def test_a_list_that_no_shard_can_answer_is_not_an_empty_one(
    admin_client: Client, unmigrated: None
) -> None:
    response = admin_client.get(url(Photo, "changelist"))
    assert response.status_code == 503
    page_text = text(response)
    assert "No shard could run the query" in page_text and Photo._meta.db_table in page_text
    assert 'name="_shard"' in response.content.decode()


def test_all_shards_but_those_of_a_node(admin_client: Client, node_down: str) -> None:
    response = admin_client.get(url(Photo, "changelist"))
    assert sorted(titles(response)) == ["photo of 1", "photo of 3"]
    assert f"8 shards (photos_00008 … photos_00015) on {node_down}: " in text(response)


@pytest.mark.parametrize("scope", [{"_shard": SHARD[TWO]}, {"_key": TWO}])
def test_the_shard_itself(admin_client: Client, node_down: str, scope: dict[str, Any]) -> None:
    response = admin_client.get(url(Photo, "changelist", **scope))
    assert response.status_code == 503
    page_text = text(response)
    assert f"{SHARD[TWO]} on {node_down} does not answer: " in page_text
    assert str(runtime.topology().nodes[node_down]["PASSWORD"]) not in response.content.decode()
    # The picker leads to other shards.
    assert 'name="_shard"' in response.content.decode()


def test_a_filter_leaves_the_shard_that_is_down(admin_client: Client, node_down: str) -> None:
    response = admin_client.get(url(Photo, "changelist", user_id=TWO, _count=1))
    assert titles(response) == []
    assert f"{SHARD[TWO]} on {node_down}: " in text(response)


def test_a_refused_login_is_told_without_the_account() -> None:
    error = Exception(1045, "Access denied for user 'app'@'10.0.0.3' (using password: YES)")
    assert cause_of(error) == "access denied (1045)"


@pytest.mark.parametrize("code", [1142, 1143, 1227, 1370])
def test_a_refused_statement_is_told_without_the_account(code: int) -> None:
    error_message = "SELECT command denied to user 'app'@'10.0.0.3' for table 'photo'"
    assert cause_of(DatabaseError(code, error_message)) == (
        "DatabaseError: SELECT command denied to this account for table 'photo'"
    )


def test_a_cause_that_is_said_in_other_words_than_text() -> None:
    assert cause_of(ValueError({"to": 1})) == "ValueError: {'to': 1}"


def test_an_action_while_a_node_is_down(admin_client: Client, node_down: str) -> None:
    names = [
        object_id_by_hand(photo)
        for photo in (Photo(user_id=TWO, pk=1), Photo.objects.get(user_id=ONE))
    ]
    response = admin_client.post(url(Photo, "changelist"), action_data("star", *names))
    success, failure = message_texts(response)
    assert success == f"warning: Give five stars: 1 row on {SHARD[ONE]} (1)."
    assert failure.startswith(
        f"error: Not done on {SHARD[TWO]} on {node_down}: the node does not answer"
    )
    assert Photo.objects.get(user_id=ONE).stars == 5


def test_a_node_that_is_down_is_asked_once(
    admin_client: Client, node_down: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that is down is tried once, not for each shard: each try may take seconds."""
    pools = import_module(f"sharded_orm.backends.{connections[SHARD[TWO]].vendor}.node")
    tried = []
    connect = pools.connect

    def count(params: Any) -> Any:
        if params["port"] == 1:
            tried.append(params["host"])
        return connect(params)

    monkeypatch.setattr(pools, "connect", count)
    response = admin_client.post(
        url(Photo, "changelist"), action_data("star", "1~1", select_across=1)
    )
    assert message_texts(response)[-1].startswith(
        f"error: Not done on 8 shards (photos_00008 … photos_00015) on {node_down}: "
    )
    # The list is built first; then the action queries the shards.
    assert len(tried) == 2


def test_an_action_that_must_see_all_rows(admin_client: Client, node_down: str) -> None:
    response = admin_client.post(
        url(Photo, "changelist"), action_data("names_of_all", "1~1", select_across=1)
    )
    assert response.status_code == 302
    assert message_texts(response)[-1] == (
        "error: This action needs all of the rows at once. No items have been changed."
    )


@pytest.fixture
def misplaced(rows: Rows) -> Photo:
    """A photo of TWO on the shard of ONE."""
    table, pk = Photo._meta.db_table, 4_000_000
    with connections[SHARD[ONE]].cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {table} (photo_id, user_id, title) VALUES (%s, %s, 'lost')", [pk, TWO]
        )
    return Photo.objects.using(SHARD[ONE]).get(pk=pk)


def test_misplaced_rows_are_marked(admin_client: Client, misplaced: Photo) -> None:
    response = admin_client.get(url(Photo, "changelist", _shard=SHARD[ONE]))
    assert len(titles(response)) == 3
    assert "1 row is misplaced" in text(response)
    page = response.content.decode()
    assert page.count('<strong class="misplaced">') == 1
    assert url(Photo, "change", f"@{SHARD[ONE]}~{misplaced.pk}") in page
    # It has no checkbox, and no action accepts it.
    assert page.count('name="_selected_action"') == 2
    for scope in ({}, {"_shard": SHARD[ONE]}):
        for name in (f"@{SHARD[ONE]}~{misplaced.pk}", f"{TWO}~{misplaced.pk}", str(misplaced.pk)):
            response = admin_client.post(
                url(Photo, "changelist", **scope), action_data("star", name)
            )
            assert message_texts(response)[-1].startswith(
                "warning: 1 of 1 selected rows are not here"
            )
    misplaced.refresh_from_db(using=SHARD[ONE])
    assert misplaced.stars is None
    everywhere = admin_client.get(url(Photo, "changelist", q="lost"))
    assert titles(everywhere) == ["lost"]
    assert everywhere.content.decode().count('<strong class="misplaced">') == 1
    assert titles(admin_client.get(url(Photo, "changelist", _key=TWO))) == ["photo of 2"]


@pytest.mark.parametrize("scope", [{}, {"_shard": SHARD[ONE]}])
def test_misplaced_rows_are_not_among_all(
    admin_client: Client, misplaced: Photo, scope: dict[str, Any]
) -> None:
    here = url(Photo, "changelist", **scope)
    response = admin_client.post(here, action_data("star", "x", select_across=1))
    warning, success = message_texts(response)
    assert warning == (
        f"warning: 1 misplaced row on {SHARD[ONE]} (1) is left alone: its key leads to another"
        " shard."
    )
    assert f"{SHARD[ONE]} (2)" in success
    assert Photo.objects.using(SHARD[ONE]).get(pk=misplaced.pk).stars is None
    assert set(Photo.objects.using(SHARD[ONE]).exclude(pk=misplaced.pk).values_list("stars")) == {
        (5,)
    }
    # Also in one queryset of all shards.
    response = admin_client.post(here, action_data("names_of_all", "x", select_across=1))
    assert "lost" not in response.content.decode()
    # Rows of the key on its own shard are selected.
    assert ("photo of 2" in response.content.decode()) == (not scope)


def test_all_rows_beside_a_misplaced_one_are_deleted(
    admin_client: Client, misplaced: Photo
) -> None:
    here = url(Photo, "changelist", _shard=SHARD[ONE])
    page = admin_client.post(here, action_data("delete_selected", "x", select_across=1))
    admin_client.post(here, confirmation(page))
    assert [str(photo) for photo in Photo.objects.using(SHARD[ONE])] == ["lost"]


def test_more_misplaced_rows_than_an_action_can_leave_alone(
    admin_client: Client, misplaced: Photo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sharded_orm.admin.misplaced_rows.MAX_MISPLACED_KEYS", 0)
    here = url(Photo, "changelist")
    success, failure = message_texts(
        admin_client.post(here, action_data("star", "x", select_across=1))
    )
    assert success == f"warning: Give five stars: 1 row on {SHARD[TWO]} (1)."
    assert failure.startswith(f"error: Not done on {SHARD[ONE]} on {node(SHARD[ONE])}: ")
    assert "more than 0 shard keys have rows" in failure
    assert Photo.objects.get(user_id=ONE).stars is None


def test_rows_beside_a_misplaced_one_are_edited(admin_client: Client, misplaced: Photo) -> None:
    here = url(Photo, "changelist", _shard=SHARD[ONE])
    photos = [form.instance for form in admin_client.get(here).context["cl"].formset.forms]
    photo = next(photo for photo in photos if photo.user_id == ONE)
    others = [other for other in photos if other != photo]
    assert admin_client.post(here, list_data(photo, *others, stars=4)).status_code == 302
    assert Photo.objects.get(user_id=ONE).stars == 4
    # The misplaced row itself is not written.
    assert admin_client.post(here, list_data(misplaced, stars=2)).status_code == 302
    assert Photo.objects.using(SHARD[ONE]).get(pk=misplaced.pk).stars is None


def test_no_mark_without_one(admin_client: Client, rows: Rows) -> None:
    response = admin_client.get(url(Comment, "changelist", _shard=SHARD[ONE]))
    assert "misplaced" not in text(response)
    assert "column-sharded_orm_shard" not in response.content.decode()
