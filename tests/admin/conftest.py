"""Fixtures: persons whose keys have known shards, some of their rows, and users with permissions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from django.contrib.admin.utils import quote
from django.contrib.auth.models import Permission, User
from django.core.management.color import no_style
from django.db import connection
from django.test import Client
from django.urls import clear_url_caches, path, reverse
from django.utils.formats import reset_format_cache

from sharded_orm import runtime
from sharded_orm.models import Placement
from tests.admin import site as urls
from tests.admin.site import site
from tests.photos.models import Album, Comment, Person, Photo, Tag

# Keys and their shards, imported here for the tests. ONE and NEAR share a shard.
from tests.queries.conftest import DATABASES as DATABASES
from tests.queries.conftest import NEAR as NEAR
from tests.queries.conftest import ONE as ONE
from tests.queries.conftest import SHARD as SHARD
from tests.queries.conftest import TWO as TWO
from tests.queries.conftest import UNPLACED as UNPLACED


@pytest.fixture
def placed(db: None) -> None:
    store = runtime.strategy("photos").store  # type: ignore[attr-defined]
    store.place("photos", {str(key): int(alias[-5:]) for key, alias in SHARD.items()})
    Person.objects.bulk_create(
        Person(pk=key, username=f"person{key}") for key in (*SHARD, UNPLACED)
    )
    # A sequence of PostgreSQL takes no notice of given ids.
    with connection.cursor() as cursor:
        for statement in connection.ops.sequence_reset_sql(no_style(), [Person]):
            cursor.execute(statement)


def logged_in(user: User) -> Client:
    client = Client()
    client.force_login(user)
    return client


def user_with(*permissions: str) -> User:
    """A staff user with these permissions of the tests' models, such as ``view_photo``."""
    user = User.objects.create_user(f"user{User.objects.count()}", password="x", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    assert user.user_permissions.count() == len(permissions)
    return user


@dataclass
class Rows:
    """Rows of ONE (``album``), of NEAR (``near_album``) and of TWO (``other_album``)."""

    album: Album
    near_album: Album
    other_album: Album
    photo: Photo
    near_photo: Photo
    other_photo: Photo
    comment: Comment
    tag: Tag
    other_tag: Tag


@pytest.fixture
def rows(placed: None) -> Rows:
    albums = {key: Album.objects.create(owner_id=key, title=f"album of {key}") for key in SHARD}
    photos = {
        key: Photo.objects.create(user_id=key, title=f"photo of {key}", album=album)
        for key, album in albums.items()
    }
    tags = {key: Tag.objects.create(user_id=key, name=f"tag of {key}") for key in SHARD}
    photos[ONE].tags.add(tags[ONE])
    comment = Comment.objects.create(user_id=ONE, photo=photos[ONE], text="nice", author_id=TWO)
    return Rows(
        albums[ONE],
        albums[NEAR],
        albums[TWO],
        photos[ONE],
        photos[NEAR],
        photos[TWO],
        comment,
        tags[ONE],
        tags[TWO],
    )


def url(model: Any, page: str, *args: str, **query: Any) -> str:
    """``url(Photo, "change", "1~7", _shard="photos_00003")``."""
    from urllib.parse import urlencode

    name = f"admin:{model._meta.app_label}_{model._meta.model_name}_{page}"
    address = reverse(name, urlconf="tests.admin.site", args=[quote(arg) for arg in args])
    return f"{address}?{urlencode(query)}" if query else address


def object_id_by_hand(row: Any) -> str:
    """The expected object id of a row: its shard key and its primary key."""
    key = row._shard_options().key_of(row)
    return f"{key}~{row.pk}"


def inline(prefix: str, *forms: dict[str, Any], initial: int = 0) -> dict[str, Any]:
    """The POST data of an inline's forms."""
    data: dict[str, Any] = {
        f"{prefix}-TOTAL_FORMS": len(forms),
        f"{prefix}-INITIAL_FORMS": initial,
        f"{prefix}-MIN_NUM_FORMS": 0,
        f"{prefix}-MAX_NUM_FORMS": 1000,
    }
    for number, form in enumerate(forms):
        data |= {f"{prefix}-{number}-{name}": value for name, value in form.items()}
    return data


def form_of(photo: Photo, **changed: object) -> dict[str, object]:
    """The POST data of a photo's change page, with unchanged comments."""
    comments = list(photo.comments.order_by("pk"))
    data = {
        "title": photo.title,
        "album": photo.album_id or "",
        "posted_at_0": "",
        "posted_at_1": "",
        "stars": "",
        "price": "",
        "tags": [tag.pk for tag in photo.tags.all()],
        **inline(
            "comments",
            *(
                {"comment_id": c.pk, "photo": photo.pk, "text": c.text, "author": c.author_id or ""}
                for c in comments
            ),
            initial=len(comments),
        ),
    }
    return {**data, **changed}


def move(key: int, number: int) -> None:
    """Move a key to another shard, in the directory only."""
    placement = Placement.objects.using("directory").filter(group="photos", key=str(key))
    assert placement.update(shard=number) == 1
    runtime.strategy("photos").forget(key)  # type: ignore[attr-defined]


@pytest.fixture
def thousand_separators(settings: Any) -> Iterator[None]:
    """Pages write numbers as 1,000."""
    settings.USE_THOUSAND_SEPARATOR = True
    reset_format_cache()
    yield
    settings.USE_THOUSAND_SEPARATOR = False
    reset_format_cache()


@pytest.fixture
def register(db: None) -> Iterator[Callable[[Any, Any], None]]:
    """A function that replaces a model admin of the site until the test ends."""
    before = dict(site._registry)

    def register(model: Any, model_admin: Any) -> None:
        if site.is_registered(model):
            site.unregister(model)
        site.register(model, model_admin)
        renew()

    def renew() -> None:
        urls.urlpatterns[:] = [path("admin/", site.urls)]
        clear_url_caches()

    yield register
    site._registry.clear()
    site._registry.update(before)
    renew()
