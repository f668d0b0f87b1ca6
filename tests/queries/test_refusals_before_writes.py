"""Writes to several shards: an error that can be known before the first write changes no shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.core.exceptions import FieldError, ValidationError
from django.db import connections, transaction
from django.db.models import F, ProtectedError, RestrictedError, Sum, Value, Window
from django.db.models.functions import RowNumber
from django.test.utils import CaptureQueriesContext

from sharded_orm.exceptions import DeletionRefused
from sharded_orm.models.querysets.deletion_checks import may_be_refused, run_collectors
from tests.authors.models import Author, Book, Footnote, Page, Quote
from tests.photos.models import Album, Photo, Tag
from tests.queries.conftest import DATABASES, ONE, SHARD, TWO
from tests.queries.twins import World
from tests.relatives.sharded.models import Note, Passport

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.long_on("mysql"),
    pytest.mark.django_db(databases=DATABASES),
]

KEYS = (ONE, TWO)


# ##### delete() #####


@pytest.fixture
def pages(placed: None) -> dict[int, Page]:
    """A page of a book for each of two keys, on two shards."""
    for key in KEYS:
        book = Book.objects.create(id=key, author_id=key)
        Page.objects.create(id=10 * key, author_id=key, book=book)
    return {page.author_id: page for page in Page.objects.scatter()}


def quote(page: Page) -> Quote:
    row: Quote = Quote.objects.create(id=100 * page.id, author_id=page.author_id, page=page)
    return row


def footnote(page: Page, **values: Any) -> Footnote:
    row: Footnote = Footnote.objects.create(
        id=100 * page.id, author_id=page.author_id, page=page, **values
    )
    return row


def both(model: Any) -> Any:
    return model.objects.filter(author_id__in=KEYS)


def keys(model: Any) -> list[int]:
    return sorted(row.author_id for row in model.objects.scatter())


DELETE: dict[str, Callable[[Any], Any]] = {
    "keys": lambda model: both(model).delete(),
    "scatter": lambda model: model.objects.scatter().delete(),
    "adelete": lambda model: async_to_sync(both(model).adelete)(),
}
EACH_WAY = pytest.mark.parametrize("delete", DELETE.values(), ids=DELETE)


@EACH_WAY
@pytest.mark.parametrize("key", KEYS)
def test_a_row_protected_on_one_shard_stops_the_deletion_on_all(
    pages: dict[int, Page], delete: Callable[[Any], Any], key: int
) -> None:
    protecting = quote(pages[key])
    with pytest.raises(ProtectedError) as caught:
        delete(Page)
    assert caught.value.protected_objects == {protecting}
    assert keys(Page) == list(KEYS)


def test_the_error_has_the_protected_rows_of_all_shards(pages: dict[int, Page]) -> None:
    protecting = {quote(page) for page in pages.values()}
    with pytest.raises(ProtectedError) as caught:
        both(Page).delete()
    assert caught.value.protected_objects == protecting
    with pytest.raises(ProtectedError) as of_one_shard:
        Page.objects.filter(author_id=ONE).delete()
    assert caught.value.args[0] == of_one_shard.value.args[0]
    assert keys(Page) == list(KEYS)


def test_a_row_that_would_be_deleted_by_cascade_is_protected(pages: dict[int, Page]) -> None:
    protecting = quote(pages[TWO])
    with pytest.raises(ProtectedError) as caught:
        both(Book).delete()
    assert caught.value.protected_objects == {protecting}
    assert keys(Book) == keys(Page) == list(KEYS)


@EACH_WAY
def test_restricted_rows_of_all_shards(
    pages: dict[int, Page], delete: Callable[[Any], Any]
) -> None:
    restricting = {footnote(page) for page in pages.values()}
    with pytest.raises(RestrictedError) as caught:
        delete(Page)
    assert caught.value.restricted_objects == restricting
    assert keys(Page) == list(KEYS)


def test_a_restricted_row_is_deleted_with_the_row_that_restricts_it(
    pages: dict[int, Page],
) -> None:
    for page in pages.values():
        footnote(page, book_id=page.book_id)
    assert both(Book).delete()[1] == {"authors.Book": 2, "authors.Page": 2, "authors.Footnote": 2}
    assert keys(Book) == keys(Page) == keys(Footnote) == []


def test_protected_rows_count_before_restricted_rows_of_another_shard(
    pages: dict[int, Page],
) -> None:
    footnote(pages[ONE])
    protecting = quote(pages[TWO])
    with pytest.raises(ProtectedError) as caught:
        both(Page).delete()
    assert caught.value.protected_objects == {protecting}


def test_a_refused_deletion_leaves_the_transaction_of_the_group_usable(
    pages: dict[int, Page],
) -> None:
    quote(pages[TWO])
    with transaction.atomic(using="photos"):
        with pytest.raises(ProtectedError):
            both(Page).delete()
        assert keys(Page) == list(KEYS)
        Quote.objects.scatter().delete()
        assert both(Page).delete() == (2, {"authors.Page": 2})


def statements(run: Callable[[], Any], *verbs: str) -> int:
    """Return the number of statements with one of ``verbs`` on the two shards."""
    with (
        CaptureQueriesContext(connections[SHARD[ONE]]) as one,
        CaptureQueriesContext(connections[SHARD[TWO]]) as two,
    ):
        run()
    sql = [query["sql"].lstrip("( ") for query in (*one, *two)]
    return sum(text.startswith(verbs or ("SELECT", "INSERT", "UPDATE", "DELETE")) for text in sql)


def test_each_shard_is_read_twice_if_a_row_may_be_protected(pages: dict[int, Page]) -> None:
    assert may_be_refused(Page)
    of_one_shard = statements(Page.objects.filter(author_id=ONE).delete)
    assert keys(Page) == [TWO]
    Page.objects.create(id=10, author_id=ONE, book_id=ONE)
    deletes = 2  # of the row, and of the rows of the many-to-many relation with novels
    reads = of_one_shard - deletes
    assert statements(both(Page).delete) == 2 * (reads + of_one_shard)


def test_no_more_queries_if_no_row_can_be_protected(rows: list[Photo]) -> None:
    assert not may_be_refused(Photo)
    one = Photo.objects.filter(user_id=ONE)
    of_one_shard = statements(one.delete)
    for number in range(2):
        Photo.objects.create(user_id=ONE, title=str(number))
    assert statements(Photo.objects.filter(user_id__in=KEYS).delete) == 2 * of_one_shard


def test_django_refuses_values_before_rows_are_read(pages: dict[int, Page]) -> None:
    with pytest.raises(TypeError, match="values"):
        both(Page).values("pk").delete()


def test_the_message_names_the_foreign_keys_of_all_shards() -> None:
    start = "Cannot delete some instances of model 'Page' because they are referenced through"
    lists = ("'Quote.page'", "'Quote.page', 'Note.page'")

    def collector(listed: str) -> Callable[[], None]:
        def collect() -> None:
            raise ProtectedError(f"{start} protected foreign keys: {listed}.", set())

        return collect

    with pytest.raises(ProtectedError) as caught:
        run_collectors(map(collector, lists))
    assert caught.value.args[0] == f"{start} protected foreign keys: {lists[1]}."


def test_a_global_row_whose_rows_are_protected_on_two_shards(pages: dict[int, Page]) -> None:
    """Books of an editor are on the shards of their authors."""
    editor = Author.objects.create(id=1000)
    both(Book).update(editor=editor)
    protecting = {quote(page) for page in pages.values()}
    with pytest.raises(ProtectedError) as caught:
        editor.delete()
    assert caught.value.protected_objects == protecting
    assert keys(Book) == list(KEYS)


def test_rows_about_a_row_that_are_in_another_database_stop_the_deletion_on_all_shards(
    worlds: tuple[World, World],
) -> None:
    """A generic relation of sharded rows to global rows."""
    assert may_be_refused(Passport) and not may_be_refused(Note)
    passports = Passport.objects.filter(owner__in=KEYS)
    before = sorted(passports.values_list("pk", flat=True))
    assert 30 + TWO in before and len(before) > 1
    with pytest.raises(DeletionRefused) as caught:
        passports.delete()
    assert {row.object_id for row in caught.value.protected_objects} == {30 + TWO}
    assert sorted(passports.values_list("pk", flat=True)) == before


# ##### Values that cannot be converted #####

#: A value of a wrong type for a field of Photo, and the error of Django.
WRONG: dict[str, tuple[str, Any, type[Exception]]] = {
    "integer": ("stars", "abc", ValueError),
    "type": ("stars", [], TypeError),
    "time": ("posted_at", "abc", ValidationError),
    "decimal": ("price", "abc", ValidationError),
    "foreign key": ("album_id", "abc", ValueError),
}
EACH_VALUE = pytest.mark.parametrize(("name", "value", "error"), WRONG.values(), ids=WRONG)


def new(key: int, **values: Any) -> Photo:
    return Photo(user_id=key, title="new", **values)


def refuses(error: type[Exception], write: Callable[[], Any]) -> None:
    """Check that ``write`` raises ``error`` and changes no shard."""

    def run() -> None:
        with pytest.raises(error):
            write()

    assert statements(run, "INSERT", "UPDATE") == 0


@EACH_VALUE
@pytest.mark.parametrize("wrong", KEYS)
def test_bulk_create_stores_no_row(
    placed: None, name: str, value: Any, error: type[Exception], wrong: int
) -> None:
    objs = [new(key, **({name: value} if key == wrong else {})) for key in KEYS]
    refuses(error, lambda: Photo.objects.bulk_create(objs))
    assert [(obj.pk, obj._state.adding) for obj in objs] == [(None, True)] * 2


@pytest.mark.parametrize(
    ("value", "error"),
    [(F("photo_id"), ValueError), (Sum(Value(1)), FieldError), (F("no"), FieldError)],
)
def test_bulk_create_with_an_expression_that_an_insert_cannot_have(
    placed: None, value: Any, error: type[Exception]
) -> None:
    objs = [new(ONE, stars=1), new(TWO, stars=value)]
    refuses(error, lambda: Photo.objects.bulk_create(objs))


def test_bulk_create_in_an_event_loop(placed: None) -> None:
    async def create() -> None:
        await Photo.objects.abulk_create([new(ONE), new(TWO, stars="abc")])

    refuses(ValueError, async_to_sync(create))


def test_bulk_create_that_updates_rows(placed: None) -> None:
    old = [Photo.objects.create(user_id=key, title="old") for key in KEYS]
    again = [new(photo.user_id, photo_id=photo.pk, stars=1) for photo in old]
    again[1].stars = "abc"  # type: ignore[assignment]  # the wrong type
    target = connections[SHARD[ONE]].features.supports_update_conflicts_with_target
    arguments: Any = {"update_conflicts": True, "update_fields": ["title", "stars"]}
    if target:
        arguments["unique_fields"] = ["photo_id"]
    refuses(ValueError, lambda: Photo.objects.bulk_create(again, **arguments))


def test_bulk_create_converts_values_as_before(placed: None) -> None:
    """Right values that are not of the field's own type are stored."""
    objs = [
        new(ONE, stars="5", price="1.50", posted_at="2026-01-01T00:00:00Z"),
        new(TWO, stars=Value(2) + 3, price=1.5),
    ]
    Photo.objects.bulk_create(objs)
    found = Photo.objects.scatter().order_by("user_id").values_list("stars", "price")
    assert [(stars, float(price)) for stars, price in found] == [(5, 1.5), (5, 1.5)]


def test_tags_of_rows_on_two_shards(placed: None) -> None:
    """The table of a many-to-many relation."""
    photos = [Photo.objects.create(user_id=key, title="p") for key in KEYS]
    tags = [Tag.objects.create(user_id=key, name="t") for key in KEYS]
    through = Photo.tags.through
    rows = [through(photo=photo, tag=tag) for photo, tag in zip(photos, tags, strict=True)]
    through.objects.bulk_create(rows)
    assert len(through.objects.scatter()) == 2


@EACH_VALUE
@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize("is_async", [False, True])
def test_bulk_update_changes_no_row(
    placed: None, name: str, value: Any, error: type[Exception], wrong: int, is_async: bool
) -> None:
    objs = [Photo.objects.create(user_id=key, title="old") for key in KEYS]
    setattr(objs[wrong], name, value)
    fields = ["title", name.removesuffix("_id")]

    async def update() -> None:
        await Photo.objects.abulk_update(objs, fields)

    refuses(
        error,
        async_to_sync(update) if is_async else lambda: Photo.objects.bulk_update(objs, fields),
    )


@pytest.mark.parametrize(
    "value", [Sum("stars"), Window(RowNumber()), F("album__title"), F("no")], ids=repr
)
def test_bulk_update_with_an_expression_that_an_update_cannot_have(
    placed: None, value: Any
) -> None:
    objs = [Photo.objects.create(user_id=key, title="old", stars=1) for key in KEYS]
    objs[0].stars, objs[1].stars = 2, value
    refuses(FieldError, lambda: Photo.objects.bulk_update(objs, ["stars"]))


def test_bulk_update_with_expressions(placed: None) -> None:
    album = Album.objects.create(owner_id=ONE, title="a")
    objs = [Photo.objects.create(user_id=key, title="old", stars=1) for key in KEYS]
    objs[0].stars, objs[1].stars = F("stars") + 1, "7"  # type: ignore[assignment]  # an expression, and a convertible value
    objs[0].album = album
    assert Photo.objects.bulk_update(objs, ["stars", "album"]) == 2
    found = Photo.objects.scatter().order_by("user_id").values_list("stars", "album")
    assert list(found) == [(2, album.pk), (7, None)]


@EACH_VALUE
def test_update_changes_no_row(placed: None, name: str, value: Any, error: type[Exception]) -> None:
    for key in KEYS:
        Photo.objects.create(user_id=key, title="old")
    of_keys = Photo.objects.filter(user_id__in=KEYS)
    refuses(error, lambda: of_keys.update(**{"title": "new", name: value}))


def test_a_wrong_value_marks_the_block_for_rollback_as_on_one_shard(placed: None) -> None:
    stored = [Photo.objects.create(user_id=key, title="old", stars=1) for key in KEYS]
    stored[1].stars = "abc"  # type: ignore[assignment]  # the wrong type
    for objs in (stored[1:], stored):
        with transaction.atomic(using="photos"):
            with pytest.raises(ValueError, match="stars"):
                Photo.objects.bulk_update(objs, ["stars"])
            assert transaction.get_rollback(using="photos")
            transaction.set_rollback(True, using="photos")
    assert Photo.objects.scatter().count() == 2


def test_the_block_goes_on_after_a_wrong_value_of_a_new_row(placed: None) -> None:
    """Nothing was sent, so nothing has to be rolled back."""
    with transaction.atomic(using="photos"):
        with pytest.raises(ValueError, match="stars"):
            Photo.objects.bulk_create([new(ONE), new(TWO, stars="abc")])
        Photo.objects.bulk_create([new(ONE), new(TWO)])
    assert Photo.objects.scatter().count() == 2
