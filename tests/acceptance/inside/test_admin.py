"""The admin of the site's own models: each page, and the other rows that a save changes."""

from __future__ import annotations

from typing import Any

import pytest
from django.apps import apps
from django.contrib import admin
from django.contrib.admin.utils import quote
from django.test import Client
from django.urls import reverse
from django.utils.timezone import now

from sharded_orm.admin import ShardedModelAdmin, ShardedTabularInline
from sharded_orm.admin.identity import object_id
from sharded_orm.models.sharding import row_placement
from testproject.activity.models import events
from testproject.boards.models import member_of, new_board, pin_photo
from testproject.movielens.models import Movie, Rating, Tag
from testproject.photos.models import Album, Comment, Photo, PhotoAddress, WrittenComment
from tests.acceptance.inside.pages import committed

pytestmark = pytest.mark.django_db(databases="__all__")


@pytest.fixture
def boss(admin_client: Client) -> Client:
    return admin_client


@pytest.fixture
def everything(dunes: Photo, elsewhere: Photo, bela: Any) -> list[Any]:
    """At least one row of every sharded model."""
    with committed():
        Comment.objects.create(
            owner=dunes.owner, photo=dunes, author=bela, text="Nice <b>dunes</b>"
        )
    movie = Movie.objects.create(movie_id=1, title="Casablanca", genres="Drama")
    Rating.objects.create(user_id=1, movie=movie, stars=5, rated_at=now())
    Tag.objects.create(user_id=1, movie=movie, text="classic", tagged_at=now())
    models = [m for m, made in admin.site._registry.items() if isinstance(made, ShardedModelAdmin)]
    pin_photo(new_board(member_of(bela), "Sand"), dunes.photo_id)
    assert len(models) == 15
    return [model._default_manager.all().scatter().first() for model in models]


def page(row: Any, name: str) -> str:
    opts = row._meta
    args = [] if name in ("changelist", "add") else [quote(object_id(row))]
    return reverse(f"admin:{opts.app_label}_{opts.model_name}_{name}", args=args)


def test_every_model_of_the_shards_is_there() -> None:
    sharded = {m for m in apps.get_models() if getattr(m, "_is_sharded", False)}
    sharded -= {index.model for index in events.indexes}  # Tables of ids, which no page shows.
    assert sharded <= set(admin.site._registry)


def test_every_page_of_every_model(boss: Client, everything: list[Any]) -> None:
    for row in everything:
        alias, key = row._state.db, row._shard_options().key_of(row)
        read_only = isinstance(row, WrittenComment | PhotoAddress | events.model)
        for query in ("", "?q=a", f"?_shard={alias}", f"?_key={key}"):
            assert boss.get(page(row, "changelist") + query).status_code == 200
        for query in ("", f"?_key={key}"):
            response = boss.get(page(row, "add") + query)
            assert response.status_code == (403 if read_only else 200)
        for name in ("change", "history", "delete"):
            response = boss.get(page(row, name))
            assert response.status_code == (403 if read_only and name == "delete" else 200)
            assert "<b>dunes</b>" not in response.content.decode()


def test_a_search_for_a_user_s_name(boss: Client, dunes: Photo, elsewhere: Photo) -> None:
    response = boss.get(page(dunes, "changelist"), {"q": "ada"})
    assert [photo.title for photo in response.context["cl"].result_list] == ["Dunes <at> dawn"]


def test_pickers_of_an_inline_below_a_user(
    boss: Client, dunes: Photo, elsewhere: Photo, rf: Any
) -> None:
    class Photos(ShardedTabularInline):
        model = Photo
        fk_name = "owner"

    class People(admin.ModelAdmin):  # type: ignore[type-arg]
        inlines = [Photos]

    people = People(type(dunes.owner), admin.site)
    assert people.check() == []
    for photo in (dunes, elsewhere):
        request = rf.get("/")
        request.user = boss.get("/").wsgi_request.user
        [(formset, _)] = people.get_formsets_with_inlines(request, photo.owner)
        offered = formset.form.base_fields["album"].queryset
        assert list(offered) == [photo.album]


def test_a_photo_that_is_added_has_its_old_address(boss: Client, dunes: Photo) -> None:
    day, time = now().strftime("%Y-%m-%d %H:%M:%S").split()
    data = {"title": "New", "album": dunes.album_id, "posted_at_0": day, "posted_at_1": time}
    for prefix in ("tags", "comments"):
        data |= {f"{prefix}-TOTAL_FORMS": 0, f"{prefix}-INITIAL_FORMS": 0}
    data |= {"tags-TOTAL_FORMS": 1, "tags-0-text": "sun"}
    response = boss.post(f"{page(dunes, 'add')}?_key={dunes.owner_id}", data)
    assert response.status_code == 302, response.context["errors"]
    photo = Photo.objects.get(owner=dunes.owner, title="New")
    assert (photo.shard_alias, photo.album) == (dunes.shard_alias, dunes.album)
    assert [(tag.text, tag.owner_id) for tag in photo.tags.all()] == [("sun", dunes.owner_id)]
    assert Photo.objects.get(photo_id=photo.pk).owner == dunes.owner
    assert photo.title in boss.get(photo.get_absolute_url()).content.decode()


# -- Rows that are stored in addition -------------------------------------------------------


@pytest.fixture
def sent(boss: Client) -> Any:
    """Posts to a page of a row, and then runs the hooks that follow the shard's commit."""

    def post(row: Any, name: str, data: dict[str, Any], query: str = "") -> None:
        with committed():
            response = boss.post(page(row, name) + query, data)
        assert response.status_code == 302, response.context["errors"]

    return post


def forms(prefix: str, *given: dict[str, Any], initial: int = 0) -> dict[str, Any]:
    data = {f"{prefix}-TOTAL_FORMS": len(given), f"{prefix}-INITIAL_FORMS": initial}
    for number, form in enumerate(given):
        data |= {f"{prefix}-{number}-{name}": value for name, value in form.items()}
    return data


def day(name: str) -> dict[str, str]:
    return {f"{name}_0": "2026-01-01", f"{name}_1": "10:00:00"}


def form_of(photo: Photo, *given: dict[str, Any], initial: int = 0) -> dict[str, Any]:
    """The form of a photo's page, with these comments."""
    tag = photo.tags.get()
    tags = forms("tags", {"tag_id": tag.pk, "photo": photo.pk, "text": "sand"}, initial=1)
    own = {"title": photo.title, "album": photo.album_id, **day("posted_at")}
    return own | tags | forms("comments", *given, initial=initial)


def copies() -> dict[int, tuple[int, str]]:
    """Author and text of all copies by id; a copy is on the shard of its author."""
    found = WrittenComment.objects.uncached().scatter()
    assert all(
        copy._state.db == row_placement.locate(copy._shard_options(), copy).alias for copy in found
    )
    return {copy.pk: (copy.author_id, copy.text) for copy in found}


@pytest.fixture
def comment(dunes: Photo, apart: Any) -> Comment:
    """A comment by an author on another shard than the photo."""
    with committed():
        return Comment.objects.create(owner=dunes.owner, photo=dunes, author=apart, text="Where?")


def test_comments_below_a_photo_reach_their_authors(
    sent: Any, dunes: Photo, comment: Comment, apart: Any, bela: Any
) -> None:
    def stored(author: Any, **more: Any) -> dict[str, Any]:
        own = {"comment_id": comment.pk, "photo": dunes.pk, "author": author.pk}
        return own | {"text": "There!", **day("posted_at"), **more}

    new = {"photo": dunes.pk, "author": apart.pk, "text": "New", **day("posted_at")}
    sent(dunes, "change", form_of(dunes, stored(apart), new, initial=1))
    [added] = Comment.objects.filter(owner=dunes.owner, text="New")
    assert copies() == {comment.pk: (apart.pk, "There!"), added.pk: (apart.pk, "New")}
    # Another author, perhaps on another shard.
    gone = {"comment_id": added.pk, "photo": dunes.pk, "author": apart.pk, "text": "New"}
    gone |= {"DELETE": "on", **day("posted_at")}
    sent(dunes, "change", form_of(dunes, stored(bela), gone, initial=2))
    assert copies() == {comment.pk: (bela.pk, "There!")}


def test_a_comment_s_own_page_reaches_its_author(
    sent: Any, dunes: Photo, comment: Comment, apart: Any, bela: Any
) -> None:
    data = {"photo": dunes.pk, "author": bela.pk, "text": "Moved", **day("posted_at")}
    sent(comment, "change", data)
    assert copies() == {comment.pk: (bela.pk, "Moved")}
    sent(comment, "add", data | {"text": "New"}, f"?_key={dunes.owner_id}")
    assert sorted(copies().values()) == [(bela.pk, "Moved"), (bela.pk, "New")]
    sent(comment, "delete", {"post": "yes"})
    assert list(copies().values()) == [(bela.pk, "New")]


@pytest.mark.parametrize("by", ["photo", "album", "action on photos", "action on comments"])
def test_what_is_deleted_is_gone_elsewhere(
    sent: Any, dunes: Photo, elsewhere: Photo, comment: Comment, by: str
) -> None:
    with committed():
        kept = Comment.objects.create(
            owner=elsewhere.owner, photo=elsewhere, author=dunes.owner, text="Mine"
        )
    if by.startswith("action"):
        row: Any = comment if by.endswith("comments") else dunes
        names = {"_selected_action": object_id(row), "action": "delete_selected", "post": "yes"}
        sent(row, "changelist", names, f"?_shard={row._state.db}")
    else:
        sent(dunes if by == "photo" else dunes.album, "delete", {"post": "yes"})
    assert set(copies()) == {kept.pk}
    left = {pk for pk in (dunes.pk, elsewhere.pk) if Photo.objects.filter(photo_id=pk).exists()}
    assert left == ({dunes.pk, elsewhere.pk} if by.endswith("comments") else {elsewhere.pk})


def test_photos_below_an_album_have_their_old_addresses(
    boss: Client, sent: Any, dunes: Photo
) -> None:
    album = dunes.album
    old = {"photo_id": dunes.pk, "album": album.pk, "title": dunes.title, **day("posted_at")}
    new = {"album": album.pk, "title": "New", **day("posted_at")}
    data = {"title": album.title, **day("created_at")}
    sent(album, "change", data | forms("photos", old, new, initial=1))
    photo = Photo.objects.get(owner=dunes.owner, title="New")
    assert Photo.objects.get(photo_id=photo.pk).owner == dunes.owner
    sent(album, "change", data | forms("photos", old | {"DELETE": "on"}, initial=1))
    assert boss.get(f"/photo/{dunes.pk}/").status_code == 404
    assert boss.get(f"/photo/{photo.pk}/").status_code == 301


def test_what_is_changed_is_seen_on_the_site(boss: Client, dunes: Photo) -> None:
    """The site shows the change although it had the row in its cache."""
    album = Album.objects.get(owner=dunes.owner)
    assert "Coast" in boss.get(album.get_absolute_url()).content.decode()
    data = {
        "title": "Shore",
        "created_at_0": "2026-01-01",
        "created_at_1": "10:00:00",
        "photos-TOTAL_FORMS": 1,
        "photos-INITIAL_FORMS": 1,
        "photos-0-photo_id": dunes.pk,
        "photos-0-album": album.pk,
        "photos-0-title": "Dunes at noon",
        "photos-0-posted_at_0": "2026-01-01",
        "photos-0-posted_at_1": "10:00:00",
    }
    response = boss.post(page(album, "change"), data)
    assert response.status_code == 302, response.context["errors"]
    shown = boss.get(album.get_absolute_url()).content.decode()
    assert "Shore" in shown
    assert "Dunes at noon" in shown
