"""Deletion in the admin of a global row on which rows on shards depend."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib import admin
from django.test import Client

from sharded_orm.admin import ShardedModelAdmin
from tests.admin.conftest import DATABASES, NEAR, ONE, TWO, object_id_by_hand, url
from tests.admin.test_changelist import text
from tests.authors.models import Author, Award, Book, Country, Page
from tests.relatives.sharded.models import Agent, Memo, Note, Passport

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES),
    pytest.mark.urls("tests.admin.site"),
]


@pytest.fixture
def authors(placed: None, register: Any) -> dict[int, Author]:
    """An author for each of three keys, with a book of one page each."""
    for model in (Country, Author):
        register(model, admin.ModelAdmin)
    for key in (ONE, NEAR, TWO):
        author = Author.objects.create(id=key)
        book = Book.objects.create(id=10 * key, author=author)
        Page.objects.create(id=100 * key, author=author, book=book)
    return Author.objects.in_bulk()


def _delete(client: Client, row: Any) -> Any:
    object_id = object_id_by_hand(row) if hasattr(row, "_shard_options") else str(row.pk)
    return client.post(url(type(row), "delete", object_id), {"post": "yes"})


def _delete_selected(client: Client, row: Any) -> Any:
    object_id = object_id_by_hand(row) if hasattr(row, "_shard_options") else str(row.pk)
    data = {"action": "delete_selected", "_selected_action": [object_id], "post": "yes"}
    return client.post(url(type(row), "changelist"), data)


BOTH_WAYS = pytest.mark.parametrize("delete", [_delete, _delete_selected])


def _books() -> list[int]:
    return sorted(book.author_id for book in Book.objects.scatter())


@BOTH_WAYS
def test_cascade(admin_client: Client, authors: dict[int, Author], delete: Any) -> None:
    page = text(admin_client.get(url(Author, "delete", str(ONE))))
    assert "Authors: 1 Books: 1 Pages: 1" in page
    assert _books() == [ONE, TWO, NEAR]
    assert delete(admin_client, authors[ONE]).status_code == 302
    assert _books() == [TWO, NEAR]
    assert {row.author_id for row in Page.objects.scatter()} == {TWO, NEAR}
    assert not Author.objects.filter(pk=ONE).exists()


@BOTH_WAYS
@pytest.mark.parametrize("field", ["author", "sponsor"])
def test_protect(admin_client: Client, authors: dict[int, Author], field: str, delete: Any) -> None:
    values = {"author": authors[TWO], field: authors[ONE]}
    award = Award.objects.create(id=7, **values)
    page = admin_client.get(url(Author, "delete", str(ONE)))
    refused = delete(admin_client, authors[ONE])
    for response in (page, refused):
        assert response.status_code == 200
        assert "would require deleting the following protected related objects" in text(response)
        assert f"Award object ({award.pk})" in text(response)
    assert _books() == [ONE, TWO, NEAR]
    assert Author.objects.filter(pk=ONE).exists()


@BOTH_WAYS
def test_rows_on_shards_about_a_global_row(
    admin_client: Client, placed: None, register: Any, delete: Any
) -> None:
    """The rows are shown as Django shows protected ones; once they are deleted, so is the row."""
    register(Agent, admin.ModelAdmin)
    agent = Agent.objects.create(id=ONE, name="agent")
    note = Note.objects.create(id=8, name="a note", owner_id=TWO, content_object=agent)
    page = admin_client.get(url(Agent, "delete", str(ONE)))
    for response in (page, delete(admin_client, agent)):
        assert response.status_code == 200
        assert "following protected related objects: Note: a note" in text(response)
    assert Agent.objects.filter(pk=ONE).exists()
    note.delete()
    assert delete(admin_client, agent).status_code == 302
    assert not Agent.objects.filter(pk=ONE).exists()


@BOTH_WAYS
def test_global_rows_about_a_row_on_a_shard(
    admin_client: Client, placed: None, register: Any, delete: Any
) -> None:
    register(Passport, ShardedModelAdmin)
    agent = Agent.objects.create(id=ONE, name="agent")
    passport = Passport.objects.create(id=8, name="passport", owner=agent)
    memo = Memo.objects.create(id=9, name="a memo", owner=agent, content_object=passport)
    page = admin_client.get(url(Passport, "delete", object_id_by_hand(passport)))
    for response in (page, delete(admin_client, passport)):
        assert response.status_code == 200
        assert "protected related objects" in text(response)
        assert "Memo: a memo" in text(response)
    assert Passport.objects.filter(owner=ONE).exists()
    memo.delete()
    assert delete(admin_client, passport).status_code == 302
    assert not Passport.objects.filter(owner=ONE).exists()
