"""``shards where``: a key, its shard, and the reason."""

from __future__ import annotations

import io
import json

import pytest
from django.core.management import CommandError, call_command

from tests.integration.shards.conftest import Fleet
from tests.queries.conftest import DATABASES


def test_a_placed_key(fleet: Fleet) -> None:
    fleet.place(42, 3)
    fleet.place(43, 6)
    assert fleet.json("where", "photos_app.Photo", "user_id=42") == {
        "model": "photos_app.Photo",
        "field": "user_id",
        "key": 42,
        "group": "photos",
        "strategy": "directory",
        "why": "the directory places 42 on shard 3",
        "shard": 3,
        "alias": "photos_00003",
        "node": "one",
        "replica": "two",
        "schema": fleet.schema("photos", 3),
        "range": [0, 3],
        "open": True,
    }
    output = fleet.shards("where", "photo", "user_id=43").out
    assert output.splitlines() == [
        "photos_app.Photo user_id=43",
        "group    photos, by directory",
        "why      the directory places 43 on shard 6",
        "shard    6, photos_00006",
        "node     two",
        "replica  none",
        f"schema   {fleet.schema('photos', 6)}",
        "range    4 to 7, closed for new keys",
    ]
    fleet.forget(42)
    fleet.forget(43)


@pytest.mark.parametrize(
    ("alias", "said"),
    [("directory", "The directory"), ("default", None)],
)
def test_a_directory_that_cannot_be_reached_is_named(
    fleet: Fleet, alias: str, said: str | None
) -> None:
    with fleet.unreachable(alias) as file:
        run = fleet.shards("where", "Photo", "user_id=1", code=0 if said is None else 1)
    if said is not None:
        assert f"unable to open database file. {said} ({alias!r}, file {str(file)!r})" in run.err
        assert "or correct the entry in DATABASES; then run the command again." in run.err
    assert fleet.shards("where", "Photo", "user_id=1").err == ""


def test_an_unplaced_key_stays_so(fleet: Fleet) -> None:
    for _ in range(2):
        run = fleet.shards("where", "Photo", "user_id=1")
        assert "the directory has no placement of 1" in run.out
        assert "shard    none" in run.out
    assert fleet.json("where", "Photo", "user_id=1")["alias"] is None


@pytest.mark.parametrize(
    ("arguments", "alias", "why"),
    [
        (["Event", "account=1.2.3.4"], "events_00001", "md5('1.2.3.4') % 8"),
        (["Event", "account=a=b"], None, "md5('a=b') % 8"),
        (["Reading", "sensor=1005"], "archive_00001", "begins at 1000"),
        (["photos_app.Pin", f"id={3 << 46 | 9}"], "pins_00003", "bits 46 to 61"),
        (["photos_app.Pin", f"pk={3 << 46 | 9}"], "pins_00003", "bits 46 to 61"),
        (["Save", f"board={2 << 46 | 9}"], "pins_00002", "bits 46 to 61"),
        (["Save", f"board_id={2 << 46 | 9}"], "pins_00002", "bits 46 to 61"),
        # Its own id carries the shard as well.
        (["Save", f"id={2 << 46 | 9}"], "pins_00002", "bits 46 to 61"),
    ],
)
@pytest.mark.django_db(databases=DATABASES)
def test_keys_of_each_strategy(arguments: list[str], alias: str | None, why: str) -> None:
    out = io.StringIO()
    call_command("shards", "where", *arguments, "--json", stdout=out)
    shown = json.loads(out.getvalue())
    assert why in shown["why"]
    assert alias in (None, shown["alias"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["Photo", "user_id=abc"], "'abc' cannot be Photo.user_id: “abc” value must be an integer"),
        (["Photo", "user_id="], "'' cannot be Photo.user_id"),
        (["Photo", "user_id"], "'user_id' is no KEY=VALUE"),
        (["Photo", "title=x"], "'title' does not tell the shard of Photo; give user_id=…"),
        (["Photo", "nothing=x"], "'nothing' does not tell the shard of Photo; give user_id=…"),
        (["Photo", "pk=1"], "'pk' does not tell the shard of Photo"),
        (["photos_app.Pin", "id=-1"], "cannot be a shard key of group 'pins'"),
        (["photos_app.Pin", f"id={9 << 46}"], "ids of the shards 0 to 7, not of 9"),
        (["Reading", "sensor=5000"], "keys from 0 up to 4000"),
        # A key that no row can have is on no shard, whatever the strategy computes.
        (["Photo", f"user_id={10**22}"], "less than or equal to 9223372036854775807"),
        (["Photo", f"user_id=-{10**22}"], "greater than or equal to -9223372036854775808"),
        (["Photo", f"user_id={'9' * 5000}"], "value must be an integer"),
        (["Event", f"account={'x' * 101}"], "at most 100 characters (it has 101)"),
        (["Reading", f"sensor={10**22}"], "cannot be Reading.sensor"),
        (["photos_app.Pin", f"id={1 << 63}"], "less than or equal to 9223372036854775807"),
        (["Save", f"board={1 << 63}"], "less than or equal to 9223372036854775807"),
        (["Save", f"id={1 << 63}"], "less than or equal to 9223372036854775807"),
        (["Nothing", "x=1"], "no model 'Nothing'; sharded models are"),
        (["photos_app.Nothing", "x=1"], "no model 'photos_app.Nothing'"),
        (["Person", "id=1"], "photos_app.Person is not sharded"),
        (["auth.User", "id=1"], "auth.User is not sharded"),
    ],
)
@pytest.mark.django_db(databases=DATABASES)
def test_what_is_no_key(arguments: list[str], said: str) -> None:
    with pytest.raises(CommandError) as raised:
        call_command("shards", "where", *arguments)
    assert said in str(raised.value)
