"""User names that are no plain words: every page shows them, and their links work."""

from __future__ import annotations

import re
from html import unescape
from typing import Any
from urllib.parse import urljoin

import pytest
from django.contrib.auth import get_user_model
from django.core.exceptions import ValidationError
from django.db import connection
from django.test import Client
from django.urls import reverse

from testproject.photos.models import Comment
from testproject.photos.publication import publish
from testproject.photos.urls import SegmentConverter
from tests.acceptance.inside.pages import committed

pytestmark = pytest.mark.django_db(
    databases=["default", "directory", "tickets_1", "tickets_2", "photos", "addresses"]
)

User = get_user_model()

# Django's validator accepts these.
VALID = [
    ".",
    "..",
    "...",
    "a.b",
    "-",
    "+",
    "@",
    "_",
    "7",
    "comments",
    "albums",
    "tags",
    "é",
    "名前",
    "x" * 150,
]
# Django's validator refuses these, but a database may hold them: from an import, or a form without
# the validator.
HELD = [
    "", " ", " a ", "a/b", "/", "//", "a/albums/1", "../admin", "%", "%2F", "%2e%2e", "a%", "100%25", "?", "a?b=c",
    "#", "&amp;", "<b>", "'\"", "\\", "..\\", ";", ":", "http://x", "a\nb", "\t", "\x7f", "\0", "🦆", "٣",
]  # fmt: skip
if connection.features.prohibits_null_characters_in_text_exception:
    HELD.remove("\0")


def links(page: Any) -> list[str]:
    """The addresses of the site on a page, as a browser reads them."""
    found = re.findall(r'(?:href|src)="([^"]*)"', page.content.decode())
    return [link for link in map(unescape, found) if link.startswith("/photos/")]


def test_which_are_valid() -> None:
    validate = User._meta.get_field("username").run_validators
    for name in VALID:
        validate(name)
    for name in HELD:
        if name not in ("", "٣"):  # tested elsewhere; a digit of any script counts as one
            with pytest.raises(ValidationError):
                validate(name)


@pytest.mark.parametrize("name", [*VALID, *HELD])
def test_a_name_in_an_address(name: str) -> None:
    converter = SegmentConverter()
    written = converter.to_url(name)
    assert re.fullmatch(converter.regex, written) and converter.to_python(written) == name
    address = reverse("photos:user", args=[name])
    # Browsers and proxies do not normalize it to another address.
    assert urljoin("http://site/x/", address) == f"http://site{address}"
    assert address.count("/") == 3 and "?" not in address and "#" not in address
    assert not re.search("%(0|1|7F|2F|5C)", address, re.IGNORECASE) or name in ("\\", "..\\")


@pytest.mark.parametrize("name", [*VALID, *HELD])
def test_its_pages(browser: Client, bela: Any, name: str) -> None:
    owner = User.objects.create(username=name)
    photo = publish(owner, "Odd", new_album="Album", tags=["sand"])
    with committed():
        Comment.objects.create(owner=owner, photo=photo, author=owner, text="mine")
    front = browser.get("/")
    assert front.status_code == 200
    assert photo.get_absolute_url() in links(front)
    seen: set[str] = set()
    waiting = [*links(front), reverse("photos:user", args=[name])]
    while waiting:
        address = waiting.pop()
        if address in seen:
            continue
        seen.add(address)
        page = browser.get(address)
        assert page.status_code == 200, address
        who = page.context.get("owner") or page.context["author"]
        assert who == owner, address
        waiting += links(page)
    kinds = {browser.get(address).resolver_match.url_name for address in seen}
    photos = {"user", "album", "user_tag", "user_comments", "photo"}
    assert kinds == {*photos, "of_user", "around_user"}


def test_who_has_such_a_name_can_comment_and_delete(bela: Any) -> None:
    owner = User.objects.create(username="a/b")
    photo = publish(owner, "Odd", new_album="Album")
    client = Client()
    client.force_login(owner)
    assert client.get("/").status_code == 200
    address = photo.get_absolute_url()
    sent = client.post(address, {"text": "hello"})
    assert (sent.status_code, sent.headers["Location"].partition("#")[0]) == (302, address)
    page = client.get(address).content.decode()
    (delete,) = re.findall(r'action="([^"]*/delete/)"', page)
    assert client.post(unescape(delete)).headers["Location"] == address
    assert "hello" not in client.get(address).content.decode()
