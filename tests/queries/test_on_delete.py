"""Rows on shards whose global row is deleted: each policy of ``sharded_orm.on_delete``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.apps import apps
from django.contrib.admin import AdminSite
from django.contrib.admin.utils import get_deleted_objects
from django.contrib.auth.models import AnonymousUser, User
from django.db import IntegrityError, connections, models, transaction
from django.db.migrations.state import ProjectState
from django.db.migrations.writer import MigrationWriter
from django.db.models.signals import post_delete, pre_delete
from django.test import RequestFactory
from django.test.utils import CaptureQueriesContext

import sharded_orm
from sharded_orm import bound, on_delete
from sharded_orm.admin import ShardedModelAdmin
from sharded_orm.exceptions import BoundKeyMismatch, CrossShardRelation
from tests.authors.models import Author, Award, Book, Country, Page, Quote
from tests.queries.conftest import DATABASES, NEAR, ONE, SHARD, TWO, UNPLACED

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]


@pytest.fixture
def authors(placed: None) -> dict[int, Author]:
    """An author for each of three keys, with two books of a page each; and one without a shard."""
    country = Country.objects.create(id=1)
    for key in (ONE, NEAR, TWO):
        author = Author.objects.create(id=key, country=country)
        for number in (1, 2):
            book = Book.objects.create(id=10 * key + number, author=author)
            Page.objects.create(id=100 * key + number, author=author, book=book)
    Author.objects.create(id=UNPLACED)
    return Author.objects.in_bulk()


def _keys(model: Any) -> list[int]:
    return sorted({row.author_id for row in model.objects.scatter()})


DELETE: dict[str, Callable[[Author], Any]] = {
    "row": lambda author: author.delete(),
    "queryset": lambda author: Author.objects.filter(pk=author.pk).delete(),
}
BOTH_WAYS = pytest.mark.parametrize("delete", DELETE.values(), ids=DELETE)


@BOTH_WAYS
def test_cascade_deletes_the_rows_on_the_shard_of_the_key(
    authors: dict[int, Author], delete: Callable[[Author], Any]
) -> None:
    with CaptureQueriesContext(connections[SHARD[TWO]]) as elsewhere:
        deleted = delete(authors[ONE])
    # As many as on one database, and those of the pages that the shard deletes with the books.
    assert deleted == (5, {"authors.Author": 1, "authors.Book": 2, "authors.Page": 2})
    assert _keys(Book) == _keys(Page) == [TWO, NEAR]
    assert not Author.objects.filter(pk=ONE).exists()
    # The other two foreign keys are not the shard key, so their rows may be anywhere.
    tables = {sql["sql"].split("authors_")[1].split("`")[0].split('"')[0] for sql in elsewhere}
    assert tables <= {"book", "award"}


def test_cascade_by_another_field_finds_rows_on_all_shards(authors: dict[int, Author]) -> None:
    Book.objects.filter(author__in=[ONE, TWO]).update(editor=authors[NEAR])
    assert authors[NEAR].delete()[0] == 1 + 6 + 6
    assert _keys(Book) == _keys(Page) == []


@pytest.mark.parametrize("key", [NEAR, TWO])
def test_cascade_to_rows_of_another_key_than_the_bound_one_is_refused(
    authors: dict[int, Author], key: int
) -> None:
    Book.objects.filter(author=key).update(editor=authors[ONE])
    with bound(author=ONE), pytest.raises(BoundKeyMismatch, match="unbound"):
        authors[ONE].delete()
    assert len(Book.objects.scatter()) == 6
    assert Author.objects.filter(pk=ONE).exists()
    Book.objects.filter(author=key).update(editor=None)
    with bound(author=ONE):
        assert authors[ONE].delete()[0] == 5


def test_rows_of_several_global_rows_and_of_rows_that_cascade_to_them(
    authors: dict[int, Author],
) -> None:
    assert Country.objects.all().delete() == (
        16,
        {"authors.Country": 1, "authors.Author": 3, "authors.Book": 6, "authors.Page": 6},
    )
    assert _keys(Book) == _keys(Page) == []


def test_a_key_that_has_no_shard_has_no_rows(authors: dict[int, Author]) -> None:
    assert authors[UNPLACED].delete() == (1, {"authors.Author": 1})
    assert len(_keys(Book)) == 3


def test_rows_on_the_shard_are_deleted_first(authors: dict[int, Author]) -> None:
    """If the global row cannot be deleted, the deletion can be run again."""
    books: list[int] = []

    def look(sender: Any, instance: Author, **kwargs: Any) -> None:
        books.append(Book.objects.filter(author=instance).count())

    pre_delete.connect(look, sender=Author)
    try:
        with connections["default"].execute_wrapper(_refusing):
            with pytest.raises(IntegrityError), transaction.atomic():
                authors[ONE].delete()
    finally:
        pre_delete.disconnect(look, sender=Author)
    assert books == [2]
    assert Author.objects.filter(pk=ONE).exists()
    assert _keys(Book) == [TWO, NEAR]
    assert Author.objects.get(pk=ONE).delete() == (1, {"authors.Author": 1})


@BOTH_WAYS
def test_signals_name_the_global_deletion_as_the_origin(
    authors: dict[int, Author], delete: Callable[[Author], Any]
) -> None:
    origins: list[tuple[type[models.Model], Any]] = []

    def look(sender: Any, origin: Any, **kwargs: Any) -> None:
        origins.append((sender, origin))

    for signal in (pre_delete, post_delete):
        signal.connect(look)
    try:
        delete(authors[ONE])
    finally:
        for signal in (pre_delete, post_delete):
            signal.disconnect(look)
    assert {sender for sender, _ in origins} == {Author, Book, Page}
    assert {getattr(origin, "model", type(origin)) for _, origin in origins} == {Author}
    assert len({id(origin) for _, origin in origins}) == 1


def _refusing(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
    if sql.startswith("DELETE FROM") and "authors_author" in sql:
        raise IntegrityError("the global database is in the way")
    return execute(sql, params, many, context)


@BOTH_WAYS
@pytest.mark.parametrize("field", ["author", "sponsor"])
def test_protect_refuses_with_the_rows(
    authors: dict[int, Author], delete: Callable[[Author], Any], field: str
) -> None:
    values = {"author": authors[ONE], "sponsor": None, field: authors[TWO]}
    award = Award.objects.create(id=1, **values)
    with pytest.raises(models.ProtectedError, match=f"Award.{field}") as refused:
        delete(authors[TWO])
    assert refused.value.protected_objects == {award}
    assert len(_keys(Book)) == 3
    award.delete()
    assert delete(authors[TWO])[0] == 5


def test_a_row_that_its_shard_protects_is_seen_before_anything_is_deleted(
    authors: dict[int, Author],
) -> None:
    page = Page.objects.get(author=TWO, pk=100 * TWO + 1)
    Quote.objects.create(id=1, author=authors[TWO], page=page)
    with pytest.raises(models.ProtectedError):
        Country.objects.all().delete()
    assert len(_keys(Book)) == 3
    assert Author.objects.count() == 4


def test_the_admin_shows_what_would_be_deleted(authors: dict[int, Author]) -> None:
    request, site = RequestFactory().get("/"), AdminSite()
    nested, counts, _, protected = get_deleted_objects([authors[ONE]], request, site)
    assert counts == {"authors": 1, "books": 2, "pages": 2}
    assert protected == []
    (author, books) = nested
    assert "Author" in author
    assert [type(part) for part in books] == [str, list, str, list]  # each book with its page
    Award.objects.create(id=1, author=authors[ONE])
    _, _, _, protected = get_deleted_objects([authors[ONE]], request, site)
    assert len(protected) == 1
    assert len(_keys(Book)) == 3


def test_the_admin_asks_for_the_permission_to_delete_the_rows_on_shards(
    authors: dict[int, Author],
) -> None:
    request, site = RequestFactory().get("/"), AdminSite()
    site.register(Book, ShardedModelAdmin)
    for user, needed in ((AnonymousUser(), {"book"}), (User(is_superuser=True), set())):
        request.user = user
        _, _, perms_needed, _ = get_deleted_objects([authors[ONE]], request, site)
        assert perms_needed == needed


def test_leave_is_what_django_calls_do_nothing(authors: dict[int, Author]) -> None:
    assert on_delete.LEAVE is models.DO_NOTHING


def test_a_deletion_in_a_transaction_of_the_shard_is_rolled_back_with_it(
    authors: dict[int, Author],
) -> None:
    with pytest.raises(KeyError), transaction.atomic(), sharded_orm.atomic(Book, author=ONE):
        authors[ONE].delete()
        raise KeyError
    assert len(_keys(Book)) == 3
    assert Author.objects.filter(pk=ONE).exists()


def test_policies_are_written_into_migrations() -> None:
    for policy in (on_delete.CASCADE, on_delete.PROTECT):
        text, imports = MigrationWriter.serialize(policy)
        assert text == f"sharded_orm.on_delete.{policy.__name__}"
        assert imports == {"import sharded_orm.on_delete"}


def test_models_of_a_migration_cannot_find_the_rows(authors: dict[int, Author]) -> None:
    """They do not know their shards, so nothing is deleted."""
    historical = ProjectState.from_apps(apps).apps.get_model("authors", "Author")
    with pytest.raises(CrossShardRelation, match=r"authors\.Book"):
        historical.objects.using("default").filter(pk=ONE).delete()
    assert Author.objects.filter(pk=ONE).exists()
