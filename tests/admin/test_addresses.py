"""Object ids: a URL finds its row on the shard to which the key leads, and no other row."""

from __future__ import annotations

import pytest
from django.contrib.admin.utils import quote, unquote
from django.db import connections
from django.test import Client

from sharded_orm import runtime
from sharded_orm.admin.exceptions import InvalidObjectID
from sharded_orm.admin.identity import identify, is_misplaced, object_id, parse
from sharded_orm.models.sharding.options import shard_options
from tests.admin.conftest import (
    DATABASES,
    NEAR,
    ONE,
    SHARD,
    TWO,
    UNPLACED,
    Rows,
    move,
    object_id_by_hand,
    url,
)
from tests.photos.models import Album, Board, Event, Like, Photo, Reading, Save, Visit

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.long_on("mysql", "postgresql"),
    pytest.mark.django_db(databases=DATABASES),
    pytest.mark.urls("tests.admin.site"),
]


def test_it_is_the_key_and_the_primary_key(rows: Rows) -> None:
    assert object_id(rows.photo) == f"1~{rows.photo.pk}"
    assert object_id(rows.other_album) == f"2~{rows.other_album.pk}"


def test_it_is_the_primary_key_where_that_tells_the_shard(placed: None) -> None:
    board = Board.objects.create(name="b")
    visit = Visit.objects.create(page="p")
    like = Like.objects.create(board=board)
    for row in (board, visit, like):
        assert object_id(row) == str(row.pk)


@pytest.mark.parametrize(
    "account", ["alice", "a~b", "50%", "@photos_00003~7", "%7E", "a/b?c#d", "é ü", "~", "%"]
)
def test_any_text_can_be_a_key(admin_client: Client, placed: None, account: str) -> None:
    event = Event.objects.create(account=account, number=7)
    options = shard_options(Event)
    assert options is not None
    identity = parse(options, unquote(quote(object_id(event))))
    assert (identity.key, identity.pk, identity.misplaced) == (account, event.pk, False)
    response = admin_client.get(url(Event, "change", object_id(event)))
    assert response.status_code == 200
    assert response.context["original"].account == account


@pytest.mark.parametrize(
    "name",
    [
        "{pk}",  # without a key
        "2~{pk}",  # of a key on another shard
        "3~{pk}",  # of another key on the same shard
        "404~{pk}",  # of a key without a shard
        "one~{pk}",
        "1~one",
        "~{pk}",
        "1~",
        "~",
        "@",
        "@photos_00012~{pk}",  # there is no such row there
        "@photos_99999~{pk}",
        "@events_00001~{pk}",
        "@default~{pk}",
        "@photos~{pk}",
        "1~{pk}~2",
        "99999999999999999999999~{pk}",
        "1~99999999999999999999999",
        "1~\x00",
        "%00~1",
        "'--~1",
    ],
)
@pytest.mark.parametrize("page", ["change", "delete", "history", "site"])
def test_a_forged_one_is_not_found(admin_client: Client, rows: Rows, name: str, page: str) -> None:
    address = url(Photo, page, name.format(pk=rows.photo.pk))
    assert admin_client.get(address).status_code == 404
    if page in ("change", "delete"):
        assert admin_client.post(address, {"post": "yes", "title": "forged"}).status_code == 404
    assert Photo.objects.get(user_id=ONE, pk=rows.photo.pk).title == "photo of 1"


def test_the_shards_of_equal_ids_are_told_apart(admin_client: Client, placed: None) -> None:
    for key in (ONE, TWO):
        Photo.objects.create(photo_id=77, user_id=key, title=f"the 77 of {key}")
    for key in (ONE, TWO):
        response = admin_client.get(url(Photo, "change", f"{key}~77"))
        assert response.context["original"].title == f"the 77 of {key}"
    assert admin_client.get(url(Photo, "change", "3~77")).status_code == 404


def test_it_follows_a_key_that_was_moved(admin_client: Client, rows: Rows) -> None:
    address = url(Album, "change", object_id_by_hand(rows.album))
    assert admin_client.get(address).status_code == 200
    move(ONE, 12)
    assert admin_client.get(address).status_code == 404
    # The row is moved, too.
    with connections[SHARD[TWO]].cursor() as cursor:
        cursor.execute(
            "INSERT INTO photos_app_album (album_id, owner_id, title) VALUES (%s, 1, 'moved')",
            [rows.album.pk],
        )
    assert admin_client.get(address).context["original"].title == "moved"


def test_a_row_that_its_key_does_not_lead_to_can_be_looked_at(
    admin_client: Client, rows: Rows
) -> None:
    move(ONE, 12)
    [stranded] = Album.objects.using(SHARD[ONE]).filter(owner_id=ONE)
    assert object_id(stranded) == f"@{SHARD[ONE]}~{stranded.pk}"
    address = url(Album, "change", object_id(stranded))
    response = admin_client.get(address)
    assert response.status_code == 200
    assert b"not where its shard key leads" in response.content
    assert b'name="_save"' not in response.content
    assert admin_client.post(address, {"title": "x"}).status_code == 403
    assert admin_client.get(url(Album, "delete", object_id(stranded))).status_code == 403
    assert admin_client.post(address, {"title": "x", "_saveasnew": "1"}).status_code == 403


def test_an_identity_holds_for_the_values_of_its_row_only(rows: Rows) -> None:
    album = rows.album
    identify([album])
    move(ONE, 12)
    # The answers are kept until identify() is called again.
    assert object_id(album) == f"{ONE}~{album.pk}"
    assert not is_misplaced(album)
    identify([album])
    assert object_id(album) == f"@{SHARD[ONE]}~{album.pk}"
    assert is_misplaced(album)
    # They are not used if the row has another key, id or shard.
    album.owner_id = NEAR
    assert object_id(album) == f"{NEAR}~{album.pk}"
    assert not is_misplaced(album)
    identify([album])
    album.pk += 1
    assert object_id(album) == f"{NEAR}~{album.pk}"
    identify([album])
    album._state.db = SHARD[TWO]
    assert object_id(album) == f"@{SHARD[TWO]}~{album.pk}"


def test_an_id_alone_needs_the_shard_beside_it(admin_client: Client, rows: Rows) -> None:
    pk = str(rows.photo.pk)
    assert admin_client.get(url(Photo, "change", pk)).status_code == 404
    assert admin_client.get(url(Photo, "change", pk, _shard=SHARD[ONE])).status_code == 200
    assert admin_client.get(url(Photo, "change", pk, _shard=SHARD[TWO])).status_code == 404
    assert admin_client.get(url(Photo, "change", pk, _shard="photos_77777")).status_code == 404
    assert admin_client.get(url(Photo, "change", pk, _shard="default")).status_code == 404


@pytest.mark.parametrize("model", [Board, Save, Visit, Reading])
def test_ids_that_lead_to_no_shard_are_not_found(
    admin_client: Client, placed: None, model: type[Board]
) -> None:
    for name in ("0", "-1", "1", str(2**63 - 1), str(2**70), "x", "5~1", "-5~1"):
        assert admin_client.get(url(model, "change", name)).status_code == 404, name


def test_nothing_is_placed_by_looking(admin_client: Client, rows: Rows) -> None:
    admin_client.get(url(Photo, "change", f"{UNPLACED}~1"))
    admin_client.get(url(Photo, "add", _key=UNPLACED))
    assert runtime.locate("photos", UNPLACED) is None


def test_parse_tells_why(rows: Rows) -> None:
    options = shard_options(Photo)
    assert options is not None
    with pytest.raises(InvalidObjectID, match="does not tell on which shard"):
        parse(options, "7")
    with pytest.raises(InvalidObjectID, match="Nothing is stored for the key 404"):
        parse(options, "404~7")
    with pytest.raises(InvalidObjectID, match="'x' cannot be"):
        parse(options, "x~7")
