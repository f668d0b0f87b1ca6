"""The changelist of one shard, of one key, and over all shards."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from html import unescape
from typing import Any

import pytest
from django.db import connections
from django.db.models import Model
from django.test import Client
from django.test.utils import CaptureQueriesContext

from sharded_orm import runtime
from sharded_orm.admin import pagination
from sharded_orm.scatter import first_rows
from tests.admin.conftest import DATABASES, ONE, SHARD, TWO, UNPLACED, Rows, object_id_by_hand, url
from tests.admin.lists import PhotoAdmin
from tests.photos.models import Comment, Event, Person, Photo

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES),
    pytest.mark.urls("tests.admin.lists"),
]


def titles(response: Any) -> list[str]:
    assert response.status_code == 200, response
    return [str(row) for row in response.context["cl"].result_list]


def text(response: Any) -> str:
    """The page without its tags, each run of white space as one space."""
    words = unescape(re.sub(r"<[^>]+>", " ", response.content.decode())).split()
    return " ".join(words).replace(" ,", ",")


def node(alias: str) -> str:
    shard = runtime.topology().resolve(alias)
    assert shard is not None
    return shard.node


@pytest.fixture
def seven_photos(placed: None) -> list[Photo]:
    """Photos p0 to p6, of ONE and TWO by turns, a day apart."""
    return [
        Photo.objects.create(
            user_id=(ONE, TWO)[number % 2],
            title=f"p{number}",
            stars=number,
            posted_at=datetime(2026, 1, 1 + number, tzinfo=UTC),
        )
        for number in range(7)
    ]


# -- Scopes ----------------------------------------------------------------------


def test_a_shard(admin_client: Client, rows: Rows) -> None:
    response = admin_client.get(url(Photo, "changelist", _shard=SHARD[ONE]))
    assert sorted(titles(response)) == ["photo of 1", "photo of 3"]
    page_text = text(response)
    assert f"shard {SHARD[ONE]} on {node(SHARD[ONE])}, open" in page_text
    assert "2 photos" in page_text


def test_a_key(admin_client: Client, rows: Rows) -> None:
    response = admin_client.get(url(Photo, "changelist", _key=ONE))
    assert titles(response) == ["photo of 1"]
    assert f"user_id 1 shard {SHARD[ONE]} on {node(SHARD[ONE])}, open" in text(response)


def test_all_shards(admin_client: Client, rows: Rows) -> None:
    response = admin_client.get(url(Photo, "changelist"))
    assert sorted(titles(response)) == ["photo of 1", "photo of 2", "photo of 3"]
    page_text = text(response)
    assert "all 16 shards" in page_text
    assert re.search(r"16 shards on 2 nodes asked, answered in \d+ ms", page_text)
    assert f'<td class="field-sharded_orm_shard"><a href="?_shard={SHARD[TWO]}">' in (
        response.content.decode()
    )


def test_a_key_without_rows(admin_client: Client, rows: Rows) -> None:
    response = admin_client.get(url(Photo, "changelist", _key=UNPLACED))
    assert titles(response) == []
    assert "no shard yet: nothing is stored for it" in text(response)
    assert runtime.locate("photos", UNPLACED) is None


def test_a_key_of_text(admin_client: Client, db: None) -> None:
    account = 'a b&c"<i>é'
    Event.objects.create(account=account, number=3)
    response = admin_client.get(url(Event, "changelist", _key=account))
    assert [event.account for event in response.context["cl"].result_list] == [account]
    assert "a b&amp;c&quot;&lt;i&gt;é" in response.content.decode()


@pytest.mark.parametrize(
    ("scope", "why"),
    [
        ({"_shard": "photos_00016"}, "There is no shard"),
        ({"_shard": "events_00003"}, "There is no shard"),
        ({"_shard": "default"}, "There is no shard"),
        ({"_shard": "<b>"}, "There is no shard"),
        ({"_key": "pink"}, "cannot be a value of user id"),
        ({"_key": "9" * 30}, "cannot be a value of user id"),
        ({"_key": str(ONE), "_shard": SHARD[TWO]}, "are on photos_00003"),
    ],
)
def test_a_place_that_there_is_not(
    admin_client: Client, rows: Rows, scope: dict[str, str], why: str
) -> None:
    response = admin_client.get(url(Photo, "changelist", **scope))
    assert response.status_code == 200
    assert why in text(response)
    assert "<b>" not in response.content.decode()
    # The picker leads to other shards.
    assert 'name="_shard"' in response.content.decode()


def test_the_picker_takes_the_search_along_and_not_the_page(
    admin_client: Client, rows: Rows
) -> None:
    response = admin_client.get(
        url(Photo, "changelist", _shard=SHARD[ONE], q="photo", o="1", p="1", _popup="1")
    )
    picker = response.context["cl"].picker
    assert dict(picker.parameters_to_keep) == {"q": "photo", "o": "1", "_popup": "1"}
    assert picker.all_shards_link == "?q=photo&o=1&_popup=1"
    assert picker.next == ("photos_00004", "?q=photo&o=1&_popup=1&_shard=photos_00004")


def test_the_picker_of_a_large_group_stays_small(
    admin_client: Client, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sharded_orm.admin.shard_picker.MAX_CHOICES", 15)
    offered = admin_client.get(url(Photo, "changelist")).context["cl"].picker.choices
    assert offered == [
        ("photos_00000", f"0 to 7: {node('photos_00000')}"),
        ("photos_00008", f"8 to 15: {node('photos_00008')}"),
    ]


def test_the_place_stays_in_every_link(admin_client: Client, seven_photos: list[Photo]) -> None:
    response = admin_client.get(url(Photo, "changelist", _shard=SHARD[ONE]))
    page = response.content.decode()
    links = re.findall(r'href="(\?[^"]*)"', page)
    picker = response.context["cl"].picker
    other_shards = {"?", picker.previous[1], picker.next[1]}
    scoped_links = [link.replace("&amp;", "&") for link in links]
    scoped_links = [link for link in scoped_links if link not in other_shards]
    assert len(scoped_links) > 10  # Pages, orders, filters, dates.
    assert all(f"_shard={SHARD[ONE]}" in link for link in scoped_links), scoped_links
    assert f'<input type="hidden" name="_shard" value="{SHARD[ONE]}">' in page
    add = re.search(r'href="/admin/photos_app/photo/add/\?([^"]*)"', page)
    assert add is not None and f"_shard={SHARD[ONE]}" in add[1].split("&amp;")
    first = next(iter(response.context["cl"].result_list))
    assert f"/admin/photos_app/photo/{object_id_by_hand(first)}/change/" in page


# -- Costs -----------------------------------------------------------------------


class Statements:
    """The statements that are sent to each alias."""

    def __init__(self, *aliases: str) -> None:
        self.contexts = {alias: CaptureQueriesContext(connections[alias]) for alias in aliases}

    def __enter__(self) -> Statements:
        for context in self.contexts.values():
            context.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        for context in self.contexts.values():
            context.__exit__(*exc)

    def __getitem__(self, alias: str) -> list[str]:
        return [query["sql"] for query in self.contexts[alias].captured_queries]


def count_about(model: type[Model], statements: list[str]) -> int:
    return sum(model._meta.db_table in sql for sql in statements)


def test_a_shard_costs_what_django_asks_of_one_database(admin_client: Client, rows: Rows) -> None:
    event = Event.objects.create(account="a", number=1)
    alias = str(event._state.db)
    with Statements("default") as django:
        admin_client.get(url(Person, "changelist"))
    with Statements("default", "directory", alias) as by_shard:
        admin_client.get(url(Event, "changelist", _shard=alias))
    with Statements("default", "directory", alias) as by_key:
        admin_client.get(url(Event, "changelist", _key="a"))
    # Two counts (of the result, of all rows) and the rows; the others are for the session.
    assert count_about(Person, django["default"]) == 3
    assert len(by_shard[alias]) == len(by_key[alias]) == 3
    assert len(by_shard["default"]) == len(by_key["default"]) == len(django["default"]) - 3
    assert by_shard["directory"] == by_key["directory"] == []


@pytest.mark.django_db(databases=DATABASES, transaction=True)
def test_the_directory_is_asked_once_for_the_keys_of_a_page(
    admin_client: Client, rows: Rows
) -> None:
    for scope in ({"_shard": SHARD[ONE]}, {}):
        runtime.strategy("photos").forget()  # type: ignore[attr-defined]
        counts = []
        for _ in range(2):
            with Statements("directory") as statements:
                assert len(titles(admin_client.get(url(Photo, "changelist", **scope)))) > 1
            counts.append(len(statements["directory"]))
        assert counts == [1, 0]


@pytest.mark.django_db(databases=DATABASES, transaction=True)
@pytest.mark.parametrize(("few", "phases"), [(10_000, 1), (0, 2)])
def test_all_shards_cost_a_statement_per_node_and_phase(
    admin_client: Client, rows: Rows, monkeypatch: pytest.MonkeyPatch, few: int, phases: int
) -> None:
    monkeypatch.setattr(first_rows, "MIN_CANDIDATES", few)
    with Statements("photos") as statements:
        assert len(titles(admin_client.get(url(Comment, "changelist")))) == 1
    queries = statements["photos"]
    wrapper: Any = connections[SHARD[ONE]]
    # The comment's photo is joined. The second phase reads the row, on one of the nodes.
    assert len(queries) == ((2 if phases == 1 else 3) if wrapper.features.can_union_shards else 16)
    assert not any("COUNT(" in sql for sql in queries)


#: Queries for the dates: one for the first and the last, one for the days of their month.
DATES = 2


@pytest.mark.django_db(databases=DATABASES, transaction=True)
def test_a_page_as_it_comes_costs_two_phases_and_the_dates(
    admin_client: Client, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The costs in docs/reference/admin.md, for a list without options but its dates."""
    monkeypatch.setattr(PhotoAdmin, "list_per_page", 100)
    monkeypatch.setattr(PhotoAdmin, "search_fields", [])
    monkeypatch.setattr(PhotoAdmin, "list_display", ["title"])
    monkeypatch.setattr(PhotoAdmin, "list_filter", ["posted_at"])
    Photo.objects.scatter().update(posted_at=datetime(2026, 1, 1, tzinfo=UTC))
    wrapper: Any = connections[SHARD[ONE]]
    # SQLite needs a statement for each shard, and has one phase.
    batches, phases = (2, 2) if wrapper.features.can_union_shards else (16, 1)

    def sent(**query: Any) -> list[str]:
        with Statements("photos") as statements:
            assert len(titles(admin_client.get(url(Photo, "changelist", **query)))) == 3
        return statements["photos"]

    with_dates = sent()
    monkeypatch.setattr(PhotoAdmin, "date_hierarchy", None)
    plain = sent()
    assert len(plain) == phases * batches
    assert len(with_dates) == (phases + DATES) * batches
    assert len(sent(_facets="True")) == (phases + 1) * batches
    assert len(sent(_count=1)) == (phases + 1) * batches


# -- Pages over all shards -------------------------------------------------------


def pages(admin_client: Client, **query: Any) -> list[list[str]]:
    """The titles on all pages, reached by the links to the next page."""
    pages, link = [], None
    start = url(Photo, "changelist")
    while True:
        response = admin_client.get(
            url(Photo, "changelist", **query) if link is None else start + link
        )
        pages.append(titles(response))
        link = response.context["cl"].next_link
        if link is None:
            return pages


def test_pages_over_all_shards(admin_client: Client, seven_photos: list[Photo]) -> None:
    assert pages(admin_client, o="5") == [["p0", "p1", "p2"], ["p3", "p4", "p5"], ["p6"]]
    assert pages(admin_client, o="-5") == [["p6", "p5", "p4"], ["p3", "p2", "p1"], ["p0"]]
    assert pages(admin_client, starred="yes", q="p", o="1")[0] == ["p0", "p1", "p2"]


def test_rows_are_counted_on_demand(admin_client: Client, seven_photos: list[Photo]) -> None:
    response = admin_client.get(url(Photo, "changelist"))
    assert "rows 1 to 3 count them" in text(response)
    response = admin_client.get(url(Photo, "changelist") + response.context["cl"].count_link)
    assert "rows 1 to 3 of 7 photos" in text(response)
    links = re.findall(r'href="(\?[^"]*)"', response.content.decode())
    assert len(links) > 5 and not any("_count" in link for link in links)


@pytest.mark.parametrize("page", ["0", "-3", "x", "9" * 30, "4", "4000"])
def test_a_page_that_there_is_not(
    admin_client: Client, seven_photos: list[Photo], page: str
) -> None:
    response = admin_client.get(url(Photo, "changelist", p=page))
    page_titles = titles(response)
    if page in ("0", "-3", "x"):
        assert len(page_titles) == 3
    elif page == "4":
        assert page_titles == [] and "There is no page 4." in text(response)
    else:
        assert page_titles == [] and "Pages over all shards end at row 10000." in text(response)
    back = response.context["cl"].previous_link
    assert (back is None) == (len(page_titles) == 3)
    if back is not None:
        assert admin_client.get(url(Photo, "changelist") + back).status_code == 200


def test_pages_end_where_shards_would_read_too_much(
    admin_client: Client, seven_photos: list[Photo], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pagination, "LAST_ROW", 4)
    assert titles(admin_client.get(url(Photo, "changelist", p=2, o="5"))) == ["p3", "p4", "p5"]
    with Statements("photos") as statements:
        response = admin_client.get(url(Photo, "changelist", p=3, o="5"))
    assert titles(response) == []
    assert "end at row 4" in text(response)
    assert not any("OFFSET" in sql for sql in statements["photos"])


def test_all_rows_of_a_shard_on_one_page(admin_client: Client, seven_photos: list[Photo]) -> None:
    here = url(Photo, "changelist", _shard=SHARD[ONE])
    response = admin_client.get(here)
    assert len(titles(response)) == 3
    assert f'href="?_shard={SHARD[ONE]}&amp;all="' in response.content.decode().replace(
        f"?all=&amp;_shard={SHARD[ONE]}", f"?_shard={SHARD[ONE]}&amp;all="
    )
    assert len(titles(admin_client.get(f"{here}&all="))) == 4
    # Not over all shards.
    assert len(titles(admin_client.get(url(Photo, "changelist", all="")))) == 3


def test_without_the_number_of_all_rows(
    admin_client: Client, seven_photos: list[Photo], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PhotoAdmin, "show_full_result_count", False)
    with Statements(SHARD[ONE]) as statements:
        response = admin_client.get(url(Photo, "changelist", _shard=SHARD[ONE], q="p0"))
    assert titles(response) == ["p0"]
    assert "1 result ( Show all )" in text(response)
    assert sum("COUNT(" in sql for sql in statements[SHARD[ONE]]) == 1


def test_a_page_of_a_shard_that_there_is_not(
    admin_client: Client, seven_photos: list[Photo]
) -> None:
    # As in Django, a redirect to the list without parameters, but with the shard.
    response = admin_client.get(url(Photo, "changelist", _shard=SHARD[ONE], p=17, q="p"))
    assert response.status_code == 302
    assert response.url == url(Photo, "changelist", _shard=SHARD[ONE], e=1)
    assert len(titles(admin_client.get(response.url))) == 3


def test_columns_that_may_be_sorted_by(
    admin_client: Client, seven_photos: list[Photo], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PhotoAdmin, "sortable_by", ["title"])
    for scope in ({}, {"_shard": SHARD[ONE]}):
        page = admin_client.get(url(Photo, "changelist", **scope)).content.decode()
        assert re.findall(r'class="sortable column-(\w+)', page) == ["title"]


def test_more_rows_than_one_page_may_show(
    admin_client: Client, seven_photos: list[Photo], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PhotoAdmin, "list_max_show_all", 3)
    here = url(Photo, "changelist", _shard=SHARD[ONE])
    assert "Show all" not in text(admin_client.get(here))
    assert len(titles(admin_client.get(f"{here}&all="))) == 3


def test_numbers_with_separators(
    admin_client: Client, rows: Rows, thousand_separators: None
) -> None:
    Photo.objects.using(SHARD[ONE]).bulk_create([Photo(photo_id=10**12, user_id=ONE, title="far")])
    runtime.strategy("photos").store.place("photos", {"5000": 3})  # type: ignore[attr-defined]
    page = admin_client.get(url(Photo, "changelist", _key=5000)).content.decode()
    assert re.search(r'name="_key"[^>]* value="5000"', page)
    page = admin_client.get(url(Photo, "changelist", _key=ONE)).content.decode()
    assert f'name="_selected_action" value="{ONE}~1000000000000"' in page
    assert 'name="form-0-photo_id" value="1000000000000"' in page
    assert url(Photo, "change", f"{ONE}~1000000000000") in page


# -- Dates ---------------------------------------------------------------------


@pytest.mark.parametrize("scope", [{}, {"_shard": SHARD[ONE]}, {"_key": ONE}, {"q": "p"}])
def test_the_dates_of_a_place(admin_client: Client, seven_photos: list[Photo], scope: Any) -> None:
    # All dates are in one month, so the days are listed.
    here = [0, 2, 4, 6] if "_shard" in scope or "_key" in scope else list(range(7))
    response = admin_client.get(url(Photo, "changelist", **scope))
    days = re.findall(r"posted_at__day=(\d+)", response.content.decode())
    assert [int(day) - 1 for day in days] == here
    one_day = url(
        Photo, "changelist", posted_at__year=2026, posted_at__month=1, posted_at__day=3, **scope
    )
    assert titles(admin_client.get(one_day)) == ["p2"]


def test_years_over_all_shards(admin_client: Client, seven_photos: list[Photo]) -> None:
    Photo.objects.create(user_id=TWO, title="old", posted_at=datetime(2011, 5, 5, tzinfo=UTC))
    response = admin_client.get(url(Photo, "changelist"))
    assert re.findall(r"posted_at__year=(\d+)", response.content.decode()) == ["2011", "2026"]
