"""Every page, with the number of statements that it sends to the shards."""

from __future__ import annotations

import re
from datetime import timedelta
from html import unescape
from typing import Any

import pytest
from django.contrib.admin import ModelAdmin, site
from django.contrib.auth import get_user_model
from django.db import connections
from django.test import Client, RequestFactory
from django.test.utils import CaptureQueriesContext

from testproject.databases import SHARDS
from testproject.photos.models import Album, Photo, PhotoTag
from testproject.photos.newest import SIZE
from testproject.photos.publication import publish
from tests.acceptance.inside.pages import NODES, most_statements, titles, token

pytestmark = pytest.mark.django_db(
    databases=["default", "directory", "tickets_1", "tickets_2", "photos", "addresses"]
)

User = get_user_model()


def shards_asked() -> CaptureQueriesContext:
    return CaptureQueriesContext(connections["photos"])


def test_front_page_shows_the_newest_of_everybody(
    browser: Client, dunes: Photo, lake: Photo
) -> None:
    with shards_asked() as queries:
        page = browser.get("/")
    assert titles(page) == ["Lake", "Dunes <at> dawn"]
    assert "Dunes &lt;at&gt; dawn" in page.content.decode()
    assert dunes.get_absolute_url() in page.content.decode()
    assert 1 <= len(queries) <= most_statements(2)


def test_older_photos(browser: Client, ada: Any, bela: Any, dunes: Photo, lake: Photo) -> None:
    posted_at = dunes.posted_at - timedelta(days=1)
    for owner, album in ((ada, dunes.album), (bela, lake.album)):
        # All have the same time, so the ids decide the order.
        Photo.objects.bulk_create(
            Photo(owner=owner, album=album, title=f"{owner} {n}", posted_at=posted_at)
            for n in range(SIZE)
        )
    seen, path, sizes = [], "/", []
    while path:
        page = browser.get(path)
        seen += titles(page)
        sizes.append(len(titles(page)))
        older = re.search(r'rel="next" href="([^"]+)"', page.content.decode())
        path = f"/{unescape(older[1])}" if older else ""
    assert sizes == [SIZE, SIZE, 2]
    assert len(set(seen)) == len(seen) == 2 * SIZE + 2


@pytest.mark.parametrize(
    "before",
    [
        *("x", "_", "%00", "2026-01-01_1", f"2026-01-01T00:00Z_{2**63}"),
        # Times that no database can hold: in UTC they are out of the calendar.
        *("0001-01-01T00:00:00%2B23:59_1", "9999-12-31T23:59:59-23:59_1"),
    ],
)
def test_page_of_no_place_is_the_first_one(browser: Client, lake: Photo, before: str) -> None:
    assert titles(browser.get(f"/?before={before}")) == ["Lake"]


def test_photos_of_an_inactive_user_are_not_shown(
    browser: Client, bela: Any, dunes: Photo, lake: Photo
) -> None:
    User.objects.filter(pk=bela.pk).update(is_active=False)
    assert titles(browser.get("/")) == ["Dunes <at> dawn"]


def test_empty_front_page(browser: Client) -> None:
    with shards_asked() as queries:
        page = browser.get("/")
    assert "No photos yet" in page.content.decode()
    # No shard has an open transaction, so each node gets one statement; there are no rows to fetch.
    assert len(queries) == (SHARDS if connections["default"].vendor == "sqlite" else NODES)


def test_front_page_asks_the_global_database_once(
    browser: Client, dunes: Photo, lake: Photo, django_assert_num_queries: Any
) -> None:
    # The owners of all photos, in one query.
    with django_assert_num_queries(1, using="default"):
        browser.get("/")


def test_page_of_a_user(
    browser: Client, ada: Any, dunes: Photo, lake: Photo, django_assert_num_queries: Any
) -> None:
    publish(ada, "Moor", album=dunes.album)
    # Albums with their sizes, tags with theirs, number of photos, photos.
    with (
        django_assert_num_queries(4, using="photos"),
        django_assert_num_queries(1, using="default"),
    ):
        page = browser.get("/photos/ada/")
    assert [p.title for p in page.context["page"]] == ["Moor", "Dunes <at> dawn"]
    assert [(a.title, a.size) for a in page.context["albums"]] == [("Coast", 2)]


def test_page_of_a_user_without_photos(browser: Client, bela: Any) -> None:
    page = browser.get("/photos/bela/")
    assert page.status_code == 200
    assert "No photos yet" in page.content.decode()


def test_page_of_a_user_in_parts(browser: Client, ada: Any, dunes: Photo) -> None:
    Photo.objects.bulk_create(
        Photo(owner=ada, album=dunes.album, title=f"No. {n}") for n in range(30)
    )
    first, second = (browser.get(f"/photos/ada/?page={n}") for n in (1, 2))
    assert (len(first.context["page"]), len(second.context["page"])) == (24, 7)
    assert "?page=2" in first.content.decode()


def test_album(browser: Client, dunes: Photo, lake: Photo, django_assert_num_queries: Any) -> None:
    with (
        django_assert_num_queries(2, using="photos"),
        django_assert_num_queries(1, using="default"),
    ):
        page = browser.get(dunes.album.get_absolute_url())
    assert [photo.title for photo in page.context["photos"]] == ["Dunes <at> dawn"]


def test_old_address_redirects(
    browser: Client, dunes: Photo, django_assert_num_queries: Any
) -> None:
    # The lookup, the photo and its owner.
    with (
        django_assert_num_queries(1, using="addresses"),
        django_assert_num_queries(1, using="photos"),
        django_assert_num_queries(1, using="default"),
    ):
        answer = browser.get(f"/photo/{dunes.photo_id}/")
    assert answer.status_code == 301
    assert answer.headers["Location"] == f"/photos/ada/{dunes.photo_id}/"


def test_picture_tells_what_it_shows(browser: Client, dunes: Photo) -> None:
    page = browser.get(dunes.get_absolute_url()).content.decode()
    assert f'alt="{dunes.description}"' in page
    assert dunes.description.startswith("Drawing of ")


def test_photo_and_album_of_somebody_else_are_not_found(
    browser: Client, dunes: Photo, lake: Photo
) -> None:
    assert browser.get(f"/photos/ada/{lake.photo_id}/").status_code == 404
    assert browser.get(f"/photos/bela/albums/{dunes.album_id}/").status_code == 404


def test_address_of_a_photo_that_is_gone(browser: Client, dunes: Photo) -> None:
    address = f"/photo/{dunes.photo_id}/"
    assert browser.get(address).status_code == 301
    dunes.delete()
    assert browser.get(address).status_code == 404


def test_inactive_user_is_not_found(browser: Client, ada: Any, dunes: Photo) -> None:
    User.objects.filter(pk=ada.pk).update(is_active=False)
    assert browser.get("/photos/ada/").status_code == 404


def test_upload(as_bela: Client, bela: Any) -> None:
    form = {
        "title": "Pines",
        "new_album": "Up north",
        "tags": "#Fir,  Long  way ,fir",
        "csrfmiddlewaretoken": token(as_bela, "/upload/"),
    }
    answer = as_bela.post("/upload/", form)
    photo = Photo.objects.get(owner=bela)
    assert answer.headers["Location"] == f"/photos/bela/{photo.photo_id}/"
    assert (photo.title, photo.album.title) == ("Pines", "Up north")
    assert Photo.objects.get(photo_id=photo.photo_id).owner == bela
    tags = PhotoTag.objects.filter(owner=bela, photo=photo).order_by("text")
    assert [(tag.text, tag._state.db) for tag in tags] == [
        ("fir", photo._state.db),
        ("long way", photo._state.db),
    ]

    form |= {"title": "Moor", "album": str(photo.album_id), "new_album": ""}
    as_bela.post("/upload/", form)
    assert list(
        photo.album.photos.order_by("posted_at").values_list("title", flat=True)
    ) == ["Pines", "Moor"]  # fmt: skip
    # A new album with an existing name is the existing album.
    as_bela.post("/upload/", form | {"title": "Fjord", "album": "", "new_album": "Up north"})
    assert Album.objects.get(owner=bela).photos.count() == 3


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({"title": ""}, "title"),
        ({"new_album": ""}, "new_album"),
        ({"album": "999999"}, "album"),
        ({"album": str(2**70)}, "album"),
        ({"album": "x"}, "album"),
        ({"tags": ",".join("abcdefghi")}, "tags"),
        ({"tags": "x" * 41}, "tags"),
        ({"tags": "a/b"}, "tags"),
        ({"tags": "<b>"}, "tags"),
    ],
)
def test_upload_that_is_refused(
    as_bela: Client, bela: Any, lake: Photo, changed: dict[str, str], wrong: str
) -> None:
    form = {"title": "Pines", "new_album": "Up north", **changed}
    answer = as_bela.post("/upload/", form | {"csrfmiddlewaretoken": token(as_bela, "/upload/")})
    assert answer.status_code == 200
    assert list(answer.context["form"].errors) == [wrong]
    assert Photo.objects.filter(owner=bela).count() == 1


def test_upload_into_somebody_elses_album_is_refused(
    as_bela: Client, bela: Any, dunes: Photo
) -> None:
    form = {"title": "Pines", "album": str(dunes.album_id), "new_album": ""}
    answer = as_bela.post("/upload/", form | {"csrfmiddlewaretoken": token(as_bela, "/upload/")})
    assert list(answer.context["form"].errors) == ["album"]
    assert not Photo.objects.filter(owner=bela).exists()


def test_upload_needs_a_login(browser: Client) -> None:
    assert browser.get("/upload/").headers["Location"] == "/login/?next=/upload/"


def test_login_and_logout(browser: Client, ada: Any) -> None:
    answer = browser.post("/login/", {"username": "ada", "password": "secret"})
    assert answer.headers["Location"] == "/"
    assert "Log out" in browser.get("/").content.decode()
    browser.post("/logout/")
    assert "Log out" not in browser.get("/").content.decode()


def test_login_does_not_lead_elsewhere(browser: Client, ada: Any) -> None:
    answer = browser.post(
        "/login/?next=//elsewhere.example/", {"username": "ada", "password": "secret"}
    )
    assert answer.headers["Location"] == "/"


@pytest.mark.parametrize("who", ["nobody", "ada"])
def test_login_that_leads_to_itself(browser: Client, ada: Any, who: str) -> None:
    if who == "ada":
        browser.force_login(ada)
    answer = browser.get("/login/?next=/login/")
    assert answer.status_code == (302 if who == "ada" else 200)
    form = {"username": "ada", "password": "secret", "next": "/login/"}
    assert browser.post("/login/", form).headers["Location"] == "/"


def test_admin_of_the_global_models(browser: Client, dunes: Photo) -> None:
    browser.force_login(User.objects.create_superuser("root", password="secret"))
    for page in ("", "auth/user/", f"auth/user/{dunes.owner_id}/change/", "movielens/movie/"):
        assert browser.get(f"/admin/{page}").status_code == 200, page


def test_the_admin_draws_the_id_of_a_new_row(rf: RequestFactory, ada: Any) -> None:
    admin, request = ModelAdmin(Album, site), rf.get("/")
    request.user = ada
    assert "album_id" not in admin.get_form(request).base_fields
    form = admin.get_form(request, fields=["owner", "title"])({"owner": ada.pk, "title": "Coast"})
    assert form.is_valid(), form.errors
    album = admin.save_form(request, form, change=False)
    admin.save_model(request, album, form, change=False)
    assert Album.objects.get(owner=ada, pk=album.pk).title == "Coast"
