"""Error pages: for missing objects and for databases that are down. Also with ``DEBUG``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from secrets import token_hex
from typing import Any

import pytest
from django.db import OperationalError, connections
from django.test import Client

from testproject.photos import views
from testproject.photos.models import Photo
from tests.acceptance.inside.pages import titles

pytestmark = pytest.mark.django_db(
    databases=["default", "directory", "tickets_1", "tickets_2", "photos", "addresses"]
)


@pytest.fixture(params=[False, True], ids=["", "DEBUG"], autouse=True)
def debug(request: pytest.FixtureRequest, settings: Any) -> bool:
    settings.DEBUG = request.param
    return bool(request.param)


@contextmanager
def down(alias: str) -> Iterator[None]:
    """Make ``alias``, a shard or another database, unreachable."""
    shard = alias not in connections.settings
    if shard and connections["default"].vendor == "mysql":
        pytest.skip("a statement to a node cannot be told to be about one shard")

    def refuse(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if context["connection"].alias == alias:
            raise OperationalError("the disk is gone")
        return execute(sql, params, many, context)

    with connections["photos" if shard else alias].execute_wrapper(refuse):
        yield


def assert_not_at_the_moment(answer: Any) -> None:
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "30")
    assert "Please come again" in answer.content.decode()
    assert "Traceback" not in answer.content.decode()


def test_pages_of_everybody_go_on_without_a_shard(
    browser: Client, dunes: Photo, elsewhere: Photo
) -> None:
    with down(str(dunes.shard_alias)):
        front, tag, tags = (browser.get(path) for path in ("/", "/tags/sand/", "/tags/"))
    assert titles(front) == titles(tag) == ["Elsewhere"]
    assert "cannot be shown at the moment" in front.content.decode()
    assert [(t["text"], t["photos"]) for t in tags.context["tags"]] == [("sand", 1)]
    assert "Not all photos could be counted" in tags.content.decode()
    assert titles(browser.get("/")) == ["Elsewhere", "Dunes <at> dawn"]


def test_pages_of_a_user_whose_shard_is_down(
    browser: Client, dunes: Photo, elsewhere: Photo, caplog: pytest.LogCaptureFixture
) -> None:
    with down(str(dunes.shard_alias)):
        answers = [browser.get(path) for path in ("/photos/ada/", dunes.get_absolute_url())]
        assert browser.get(elsewhere.get_absolute_url()).status_code == 200
    for answer in answers:
        assert_not_at_the_moment(answer)
    assert "the disk is gone" in caplog.text


@pytest.mark.parametrize("path", ["/", "/photos/ada/", "/nowhere/", "/photo/999999/", "/admin/"])
def test_global_database_down_for_who_is_logged_in(
    as_bela: Client, dunes: Photo, path: str
) -> None:
    with down("default"):
        assert_not_at_the_moment(as_bela.get(path))


@pytest.mark.parametrize("variable", ["SHARDED_ORM_DEMO_MYSQL", "SHARDED_ORM_DEMO_SECRET_KEY"])
def test_an_error_page_holds_no_password(
    monkeypatch: pytest.MonkeyPatch, debug: bool, variable: str
) -> None:
    password = token_hex()

    def fail(*args: Any) -> None:
        connected = {"host": "db.example", "password": password}
        raise RuntimeError(f"a bug with {len(connected)} values")

    monkeypatch.setattr(views, "newest", fail)
    browser = Client(raise_request_exception=False)
    # Django's server puts the environment of its process into each request.
    answer = browser.get("/", **{variable: f'[{{"password": "{password}"}}]'})
    assert answer.status_code == 500
    assert ("db.example" in answer.content.decode()) is debug
    assert password not in answer.content.decode()


@pytest.mark.parametrize(
    "path",
    [
        "/photos/nobody/",
        "/nowhere/",
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
        f"/pictures/{2**64}/240.webp",
        "/pictures/12/241.webp",
        f"/pictures/12/{10**30}.webp",
        f"/pictures/{2**63 - 1}/240.webp",
        "/pictures/12.svg",
    ],
)
def test_not_found(browser: Client, dunes: Photo, path: str) -> None:
    answer = browser.get(path)
    assert answer.status_code == 404
    assert "Not found" in answer.content.decode()


def test_an_address_without_its_slash(browser: Client) -> None:
    assert browser.get("/tags").headers["Location"] == "/tags/"
