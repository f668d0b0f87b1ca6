"""Search and list filters of changelists, also by fields of global models."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.db import transaction
from django.test import Client

from sharded_orm import runtime
from sharded_orm.admin import global_lookups
from tests.admin.conftest import DATABASES, NEAR, ONE, SHARD, TWO, UNPLACED, Rows, url
from tests.admin.lists import AlbumAdmin, PhotoAdmin
from tests.admin.test_actions import action_data, message_texts
from tests.admin.test_changelist import Statements, text, titles
from tests.photos.models import Album, Comment, Person, Photo, Tag

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES),
    pytest.mark.urls("tests.admin.lists"),
]

PLACES: list[dict[str, Any]] = [{}, {"_shard": SHARD[ONE]}, {"_key": ONE}]


def filters(response: Any) -> dict[str, list[str]]:
    """Title of each filter -> its choices."""
    return {
        str(spec.title): sorted(
            str(choice["display"]) for choice in spec.choices(response.context["cl"])
        )
        for spec in response.context["cl"].filter_specs
    }


# -- Search ----------------------------------------------------------------------


@pytest.mark.parametrize("scope", PLACES)
def test_a_word(admin_client: Client, rows: Rows, scope: dict[str, Any]) -> None:
    assert titles(admin_client.get(url(Photo, "changelist", q="of 1", **scope))) == ["photo of 1"]
    assert titles(admin_client.get(url(Photo, "changelist", q="nothing", **scope))) == []
    # By the name of a tag on the same shard.
    assert titles(admin_client.get(url(Photo, "changelist", q="tag", **scope))) == ["photo of 1"]


@pytest.mark.parametrize("scope", PLACES)
def test_a_row_that_matches_twice_is_listed_once(
    admin_client: Client, rows: Rows, scope: dict[str, Any]
) -> None:
    rows.photo.tags.add(Tag.objects.create(user_id=ONE, name="tag, another"))
    response = admin_client.get(url(Photo, "changelist", q="tag", _count=1, **scope))
    assert titles(response) == ["photo of 1"]
    assert response.context["cl"].result_count == 1
    both = f"{rows.tag.pk},{Tag.objects.get(user_id=ONE, name='tag, another').pk}"
    response = admin_client.get(url(Photo, "changelist", tags__id__in=both, **scope))
    assert titles(response) == ["photo of 1"]


@pytest.mark.parametrize("scope", PLACES)
def test_a_word_of_the_global_database(
    admin_client: Client, rows: Rows, scope: dict[str, Any]
) -> None:
    by_name = url(Album, "changelist", q="person1", **scope)
    assert titles(admin_client.get(by_name)) == ["album of 1"]
    # Each word in any of the fields.
    assert titles(admin_client.get(url(Album, "changelist", q="album person1", **scope))) == [
        "album of 1"
    ]
    assert titles(admin_client.get(url(Album, "changelist", q="person1 person2", **scope))) == []
    assert titles(admin_client.get(url(Album, "changelist", q='"album of" 1', **scope))) == [
        "album of 1"
    ]


def test_the_author_of_another_shard(admin_client: Client, rows: Rows) -> None:
    assert len(titles(admin_client.get(url(Comment, "changelist", q="person2")))) == 1
    assert len(titles(admin_client.get(url(Comment, "changelist", q="person1")))) == 0


def test_more_global_rows_than_are_looked_for(
    admin_client: Client, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(global_lookups, "MAX_VALUES", 2)
    response = admin_client.get(url(Comment, "changelist", q="person"))
    assert "More than 2 persons match 'person'" in text(response)
    assert "More than" not in text(admin_client.get(url(Comment, "changelist", q="person1")))


@pytest.mark.parametrize(
    "parameters",
    [
        {"owner__username__startswith": "person"},  # a parameter of the URL
        {"owner__username__in": "person1,person2,person3"},
        {"q": "person"},
    ],
)
@pytest.mark.parametrize("scope", [{}, {"_shard": SHARD[ONE]}])
def test_more_global_rows_than_a_list_looks_for(
    admin_client: Client, rows: Rows, monkeypatch: pytest.MonkeyPatch, parameters: Any, scope: Any
) -> None:
    monkeypatch.setattr(global_lookups, "MAX_VALUES", 2)
    here = url(Album, "changelist", **parameters, **scope)
    monkeypatch.setattr(AlbumAdmin, "search_fields", ["owner__username"])
    assert text(admin_client.get(here)).count("More than 2 persons match") == 1
    # "All" would not be all matching rows.
    response = admin_client.post(here, action_data("delete_selected", rows.album, select_across=1))
    (message,) = message_texts(response)
    assert message.startswith("error: More than 2 persons match")
    assert message.endswith("No items have been changed.")
    assert response.status_code == 302
    # An action on selected rows works.
    response = admin_client.post(here, action_data("delete_selected", rows.album))
    assert response.status_code == 200


def test_more_global_rows_than_a_filter_looks_for(
    admin_client: Client, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(global_lookups, "MAX_VALUES", 2)
    response = admin_client.get(url(Album, "changelist", owner__username__isnull="False"))
    assert text(response).count("More than 2 persons match") == 1


@pytest.mark.parametrize("scope", PLACES)
def test_two_conditions_on_global_rows_are_both_kept(
    admin_client: Client, rows: Rows, scope: dict[str, Any]
) -> None:
    both = {"owner__username__startswith": "person1", "owner__username__endswith": "3"}
    assert titles(admin_client.get(url(Album, "changelist", **both, **scope))) == []
    both["owner__username__endswith"] = "1"
    assert titles(admin_client.get(url(Album, "changelist", **both, **scope))) == ["album of 1"]
    # With a condition on the keys themselves.
    conditions = {"owner__username__startswith": "person", "owner__in": str(ONE)}
    assert titles(admin_client.get(url(Album, "changelist", **conditions, **scope))) == [
        "album of 1"
    ]
    conditions["owner__username__startswith"] = "person2"
    assert titles(admin_client.get(url(Album, "changelist", **conditions, **scope))) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"owner__username__foo": 1},
        {"owner__username__range": 1},
        {"owner__username__regex": "["},
    ],
)
@pytest.mark.parametrize("scope", PLACES)
def test_a_condition_on_global_rows_that_there_is_not(
    admin_client: Client, rows: Rows, scope: dict[str, Any], wrong: dict[str, Any]
) -> None:
    response = admin_client.get(url(Album, "changelist", **wrong, **scope))
    assert response.status_code == 302
    assert response.url == url(Album, "changelist", **scope, e=1)
    if "owner__username__regex" in wrong:
        # On PostgreSQL the error has ended the transaction of the test.
        transaction.set_rollback(True)


def test_a_filter_offers_so_many_related_rows(
    admin_client: Client, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = url(Album, "changelist", _shard=SHARD[ONE])
    assert "of its choices" not in text(admin_client.get(here))
    runtime.strategy("photos").store.place("photos", {"5": 3})  # type: ignore[attr-defined]
    Album.objects.create(owner=Person.objects.create(pk=5, username="person5"), title="third")
    monkeypatch.setattr(global_lookups, "MAX_VALUES", 2)
    response = admin_client.get(here)
    assert len(response.context["cl"].filter_specs[1].lookup_choices) == 2
    assert "The filter by owner offers 2 of its choices." in text(response)


def test_the_search_form_keeps_the_place(admin_client: Client, rows: Rows) -> None:
    response = admin_client.get(url(Photo, "changelist", q="of 1", _shard=SHARD[ONE]))
    cl = response.context["cl"]
    assert ("_shard", SHARD[ONE]) in cl.search_parameters
    assert "1 result ( 2 total )" in text(response)
    assert cl.all_link == f"?_shard={SHARD[ONE]}"


# -- Filters ---------------------------------------------------------------------


def test_filters_offer_the_rows_of_the_shard(admin_client: Client, rows: Rows) -> None:
    Photo.objects.filter(user_id=NEAR).update(stars=3)
    Photo.objects.filter(user_id=TWO).update(stars=4)
    choices = filters(admin_client.get(url(Photo, "changelist", _shard=SHARD[ONE])))
    assert choices["stars"] == ["-", "3", "All"]
    assert choices["album"] == ["-", "All", "album of 1", "album of 3"]
    assert choices["tags"] == ["-", "All", "tag of 1", "tag of 3"]
    assert choices["title"] == ["All", "album of 1", "album of 3"]
    assert choices["needs a shard"] == ["All", "No", "Yes"]


def test_filters_that_need_a_shard_are_left_out_of_all(admin_client: Client, rows: Rows) -> None:
    response = admin_client.get(url(Photo, "changelist"))
    assert set(filters(response)) == {"posted at", "starred"}
    assert "To filter by stars, album, tags, needs a shard, title, choose a shard." in text(
        response
    )
    # Also for a key without a shard.
    assert set(filters(admin_client.get(url(Photo, "changelist", _key=UNPLACED)))) == {
        "posted at",
        "starred",
    }


@pytest.mark.parametrize("scope", PLACES)
def test_filtering(admin_client: Client, rows: Rows, scope: dict[str, Any]) -> None:
    Photo.objects.filter(user_id=ONE).update(stars=3)
    for condition in (
        {"stars": 3},
        {"starred": "yes"},
        {"album__album_id__exact": rows.album.pk},
        {"album__title": "album of 1"},
        {"tags__id__exact": rows.tag.pk, "q": "photo of 1"},
        {"user_id": ONE},
        {"user_id__in": f"{ONE},{UNPLACED}"},
    ):
        photo_titles = titles(admin_client.get(url(Photo, "changelist", **condition, **scope)))
        assert photo_titles == ["photo of 1"], condition


def test_filters_of_global_rows(admin_client: Client, rows: Rows) -> None:
    here = admin_client.get(url(Album, "changelist", _shard=SHARD[ONE]))
    specs = [
        [str(choice["display"]) for choice in spec.choices(here.context["cl"])]
        for spec in here.context["cl"].filter_specs
    ]
    everybody = ["All", "person1", "person2", "person3", "person404"]
    assert [sorted(spec) for spec in specs] == [everybody, ["All", "person1", "person3"], everybody]
    everywhere = admin_client.get(url(Album, "changelist"))
    assert list(filters(everywhere)) == ["owner", "username"]


@pytest.mark.parametrize("scope", PLACES)
def test_filtering_by_global_rows(admin_client: Client, rows: Rows, scope: dict[str, Any]) -> None:
    for condition in (
        {"owner__id__exact": ONE},
        {"owner__username": "person1"},
        {"owner__username__startswith": "person1"},
    ):
        photo_titles = titles(admin_client.get(url(Album, "changelist", **condition, **scope)))
        assert photo_titles == ["album of 1"], condition
    assert titles(admin_client.get(url(Album, "changelist", owner__username="x", **scope))) == []


@pytest.mark.parametrize(
    "wrong", [{"nonsense": 1}, {"stars__exact": "x"}, {"owner__password": "x"}, {"user_id": "x"}]
)
@pytest.mark.parametrize("scope", PLACES)
def test_a_filter_that_there_is_not(
    admin_client: Client, rows: Rows, scope: dict[str, Any], wrong: dict[str, Any]
) -> None:
    response = admin_client.get(url(Photo, "changelist", **wrong, **scope))
    assert response.status_code == 302
    assert response.url == url(Photo, "changelist", **scope, e=1)
    assert len(titles(admin_client.get(response.url))) > 0


def test_a_lookup_that_is_not_allowed(admin_client: Client, rows: Rows) -> None:
    response = admin_client.get(url(Comment, "changelist", photo__album__title="album of 1"))
    assert response.status_code == 400


def test_facets(admin_client: Client, rows: Rows) -> None:
    Photo.objects.filter(user_id=ONE).update(stars=3)
    choices = filters(admin_client.get(url(Photo, "changelist", _shard=SHARD[ONE], _facets="True")))
    assert choices["stars"] == ["- (1)", "3 (1)", "All"]
    assert choices["album"] == ["- (0)", "All", "album of 1 (1)", "album of 3 (1)"]
    assert choices["starred"] == ["All", "No (1)", "Yes (1)"]
    choices = filters(admin_client.get(url(Photo, "changelist", _facets="True")))
    assert choices["starred"] == ["All", "No (2)", "Yes (1)"]
    names = filters(admin_client.get(url(Album, "changelist", _shard=SHARD[ONE], _facets="True")))
    assert "person1 (-)" in names["username"]


def test_facets_that_cannot_be_merged(admin_client: Client, rows: Rows) -> None:
    # A search in tags may find a photo twice.
    response = admin_client.get(url(Photo, "changelist", _facets="True", q="tag"))
    assert filters(response)["starred"] == ["All", "No (-)", "Yes (-)"]
    assert titles(response) == ["photo of 1"]


# -- Orders and relations --------------------------------------------------------


@pytest.mark.parametrize("scope", [{}, {"_shard": SHARD[ONE]}])
def test_orders(
    admin_client: Client, rows: Rows, scope: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Person._meta, "ordering", ["username"])
    up = titles(admin_client.get(url(Photo, "changelist", o="1", **scope)))
    down = titles(admin_client.get(url(Photo, "changelist", o="-1", **scope)))
    assert up == sorted(up) == down[::-1]
    # By the key of the global row: the shard cannot join it.
    by_owner = titles(admin_client.get(url(Album, "changelist", o="2", **scope)))
    assert by_owner == sorted(by_owner)
    assert titles(admin_client.get(url(Photo, "changelist", o="99.x.-", **scope)))


def test_an_order_that_cannot_be_merged(
    admin_client: Client, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PhotoAdmin, "ordering", ["?"])
    response = admin_client.get(url(Photo, "changelist"))
    assert response.status_code == 200
    assert "This list cannot be merged over all shards." in text(response)
    assert "Show shard" in text(response)
    assert len(titles(admin_client.get(url(Photo, "changelist", _shard=SHARD[ONE])))) == 2


@pytest.mark.parametrize("scope", PLACES)
def test_related_rows_are_read_with_the_page(
    admin_client: Client, rows: Rows, scope: dict[str, Any]
) -> None:
    for key in (ONE, TWO, NEAR):
        Comment.objects.create(
            user_id=key, text="x", photo=Photo.objects.get(user_id=key), author_id=key
        )
    with Statements("photos", "default") as statements:
        response = admin_client.get(url(Comment, "changelist", **scope))
    page_text = text(response)
    assert "photo of 1" in page_text and "person1" in page_text
    # One query for all authors.
    about = [sql for sql in statements["default"] if Person._meta.db_table in sql]
    assert len(about) == 1
    assert not any(re.search(r"photo_id. = \d+ +LIMIT 21", sql) for sql in statements["photos"])


def test_a_popup_gives_the_id_alone(admin_client: Client, rows: Rows) -> None:
    response = admin_client.get(
        url(Photo, "changelist", _popup=1, _to_field="photo_id", _shard=SHARD[ONE])
    )
    page = response.content.decode()
    assert f'data-popup-opener="{rows.photo.pk}"' in page
    assert "action-checkbox" not in page and "form-TOTAL_FORMS" not in page
    # The popup is for rows of this shard.
    assert SHARD[ONE] in text(response) and "Show shard" not in text(response)
    assert "Show shard" in text(admin_client.get(url(Photo, "changelist", _popup=1)))
    assert ("_popup", "1") in response.context["cl"].search_parameters
    refused = admin_client.get(url(Photo, "changelist", _popup=1, _to_field="stars"))
    assert refused.status_code == 400
