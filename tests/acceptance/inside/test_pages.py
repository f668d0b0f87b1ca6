"""Every page, with the number of statements that the shards get for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from django.contrib.admin import ModelAdmin, site
from django.contrib.auth import get_user_model
from django.db import connections
from django.test import Client, RequestFactory
from django.test.utils import CaptureQueriesContext

from testproject.databases import SHARDS
from testproject.photos.models import Album, Comment, Photo, PhotoOwner
from testproject.photos.publishing import publish

pytestmark = pytest.mark.django_db(
    databases=["default", "directory", "tickets_1", "tickets_2", "photos"]
)

User = get_user_model()
Counting = Callable[[str, int], AbstractContextManager[Any]]


@pytest.fixture
def ada() -> Any:
    return User.objects.create_user("ada", password="secret", first_name="Ada", last_name="O.")


@pytest.fixture
def bela() -> Any:
    return User.objects.create_user("bela", password="secret")


@pytest.fixture
def dunes(ada: Any) -> Photo:
    return publish(ada, "Dunes <at> dawn", new_album="Coast")


@pytest.fixture
def lake(bela: Any) -> Photo:
    return publish(bela, "Lake", new_album="Coast")


@pytest.fixture
def browser() -> Client:
    return Client()


@pytest.fixture
def as_bela(bela: Any) -> Client:
    client = Client(enforce_csrf_checks=True)
    client.force_login(bela)
    return client


def shards_asked() -> CaptureQueriesContext:
    return CaptureQueriesContext(connections["photos"])


def token(client: Client, path: str) -> str:
    return str(client.get(path).context["csrf_token"])


def test_front_page_shows_the_newest_of_everybody(
    browser: Client, dunes: Photo, lake: Photo
) -> None:
    with shards_asked() as asked:
        page = browser.get("/")
    assert [photo.title for photo in page.context["photos"]] == ["Lake", "Dunes <at> dawn"]
    assert "Dunes &lt;at&gt; dawn" in page.content.decode()
    assert dunes.get_absolute_url() in page.content.decode()
    # One statement per shard at most; where a node's shards are united, far fewer.
    assert 1 <= len(asked) <= SHARDS


def test_empty_front_page(browser: Client) -> None:
    assert "No photos yet" in browser.get("/").content.decode()


def test_front_page_asks_the_global_database_once(
    browser: Client, dunes: Photo, lake: Photo, django_assert_num_queries: Any
) -> None:
    # The owners of all photos, together.
    with django_assert_num_queries(1, using="default"):
        browser.get("/")


def test_page_of_a_user(
    browser: Client, ada: Any, dunes: Photo, lake: Photo, django_assert_num_queries: Any
) -> None:
    publish(ada, "Moor", album=dunes.album)
    # Albums with their sizes, number of photos, photos.
    with (
        django_assert_num_queries(3, using="photos"),
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


def test_photo_with_comments(
    browser: Client, ada: Any, bela: Any, dunes: Photo, django_assert_num_queries: Any
) -> None:
    for author, text in ((bela, "First!"), (ada, "Thanks.")):
        Comment.objects.create(owner=ada, photo=dunes, author=author, text=text)
    # The photo joined with its album, and the comments; globally the owner and the authors.
    with (
        django_assert_num_queries(2, using="photos"),
        django_assert_num_queries(2, using="default"),
    ):
        page = browser.get(dunes.get_absolute_url())
    shown = [(c.author.username, c.text) for c in page.context["comments"]]
    assert shown == [("bela", "First!"), ("ada", "Thanks.")]
    assert str(dunes._state.db) in page.content.decode()


def test_old_address_redirects(
    browser: Client, dunes: Photo, django_assert_num_queries: Any
) -> None:
    with (
        django_assert_num_queries(0, using="photos"),
        django_assert_num_queries(1, using="default"),
    ):
        answer = browser.get(f"/photo/{dunes.photo_id}/")
    assert answer.status_code == 301
    assert answer.headers["Location"] == f"/photos/ada/{dunes.photo_id}/"


def test_picture_needs_no_query(browser: Client, django_assert_num_queries: Any) -> None:
    with (
        django_assert_num_queries(0, using="photos"),
        django_assert_num_queries(0, using="default"),
    ):
        answer = browser.get("/pictures/12.svg")
    assert answer.headers["Content-Type"] == "image/svg+xml"
    assert answer.content == browser.get("/pictures/12.svg").content
    assert answer.content != browser.get("/pictures/13.svg").content


@pytest.mark.parametrize(
    "path",
    [
        "/photos/nobody/",
        "/photos/nobody/1/",
        "/photos/ada/999999/",
        "/photos/ada/albums/999999/",
        "/photos/ada/0/",
        f"/photos/ada/{2**63 - 1}/",
        f"/photos/ada/{2**63}/",
        f"/photos/ada/{10**18}{10**18}/",
        f"/photos/ada/albums/{2**63}/",
        "/photo/999999/",
        f"/photo/{2**63}/",
        "/photo/-1/",
        f"/pictures/{2**64}.svg",
    ],
)
def test_not_found(browser: Client, dunes: Photo, path: str) -> None:
    answer = browser.get(path)
    assert answer.status_code == 404
    assert "Not found" in answer.content.decode()


def test_photo_and_album_of_somebody_else_are_not_found(
    browser: Client, dunes: Photo, lake: Photo
) -> None:
    assert browser.get(f"/photos/ada/{lake.photo_id}/").status_code == 404
    assert browser.get(f"/photos/bela/albums/{dunes.album_id}/").status_code == 404


def test_mapping_to_a_photo_that_is_gone(browser: Client, ada: Any, dunes: Photo) -> None:
    PhotoOwner.objects.create(photo_id=777_777, owner=ada)
    answer = browser.get("/photo/777777/", follow=True)
    assert answer.status_code == 404


def test_inactive_user_is_not_found(browser: Client, ada: Any, dunes: Photo) -> None:
    User.objects.filter(pk=ada.pk).update(is_active=False)
    assert browser.get("/photos/ada/").status_code == 404


def test_comment_lands_on_the_shard_of_the_owner(
    as_bela: Client, ada: Any, bela: Any, dunes: Photo
) -> None:
    path = dunes.get_absolute_url()
    form = {"text": "Where is this?", "csrfmiddlewaretoken": token(as_bela, path)}
    answer = as_bela.post(path, form)
    comment = Comment.objects.get(owner=ada)
    assert answer.status_code == 302
    assert answer.headers["Location"] == f"{path}#comment-{comment.pk}"
    assert (comment.author_id, comment.photo_id) == (bela.pk, dunes.pk)
    assert comment._state.db == dunes._state.db
    assert "Where is this?" in as_bela.get(path).content.decode()


def test_empty_comment_is_refused(as_bela: Client, ada: Any, dunes: Photo) -> None:
    path = dunes.get_absolute_url()
    answer = as_bela.post(path, {"text": " ", "csrfmiddlewaretoken": token(as_bela, path)})
    assert answer.status_code == 200
    assert answer.context["form"].errors
    assert not Comment.objects.filter(owner=ada).exists()


def test_comment_needs_a_login_and_a_token(
    browser: Client, as_bela: Client, ada: Any, dunes: Photo
) -> None:
    path = dunes.get_absolute_url()
    answer = browser.post(path, {"text": "Hi"})
    assert answer.status_code == 302
    assert answer.headers["Location"] == f"/login/?next={path}"
    assert as_bela.post(path, {"text": "Hi"}).status_code == 403
    assert not Comment.objects.filter(owner=ada).exists()


def test_upload(as_bela: Client, bela: Any) -> None:
    form = {
        "title": "Pines",
        "new_album": "Up north",
        "csrfmiddlewaretoken": token(as_bela, "/upload/"),
    }
    answer = as_bela.post("/upload/", form)
    photo = Photo.objects.get(owner=bela)
    assert answer.headers["Location"] == f"/photos/bela/{photo.photo_id}/"
    assert (photo.title, photo.album.title) == ("Pines", "Up north")
    assert PhotoOwner.objects.get(pk=photo.photo_id).owner == bela

    form |= {"title": "Moor", "album": str(photo.album_id), "new_album": ""}
    as_bela.post("/upload/", form)
    assert list(
        photo.album.photos.order_by("photo_id").values_list("title", flat=True)
    ) == ["Pines", "Moor"]  # fmt: skip
    # A new album of a name that is taken is that album.
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


def test_admin_of_the_global_models(browser: Client, dunes: Photo) -> None:
    browser.force_login(User.objects.create_superuser("root", password="secret"))
    pages = ["", "auth/user/", "photos/photoowner/", "movielens/movie/"]
    for page in [*pages, f"photos/photoowner/{dunes.photo_id}/change/"]:
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
