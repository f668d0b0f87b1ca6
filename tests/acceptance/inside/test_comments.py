"""Comments, which are stored for the photo and for the author."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import IntegrityError, connections, transaction
from django.test import Client

from sharded_orm import runtime
from sharded_orm.contrib.mirrors.exceptions import MirrorReadOnly
from testproject.photos.models import Comment, Photo, WrittenComment
from tests.acceptance.inside.pages import committed, token

pytestmark = pytest.mark.django_db(
    databases=["default", "directory", "tickets_1", "tickets_2", "photos", "addresses"]
)


@pytest.fixture
def comment(dunes: Photo, apart: Any) -> Comment:
    return written(dunes, apart, "Where is this?")


def written(photo: Photo, author: Any, text: str) -> Comment:
    with committed():
        return Comment.objects.create(
            owner_id=photo.owner_id, photo=photo, author=author, text=text
        )


def copies(author: Any) -> list[tuple[int, str]]:
    return list(author.written_comments.order_by("pk").values_list("comment_id", "text"))


def test_photo_with_comments(
    browser: Client, ada: Any, bela: Any, dunes: Photo, django_assert_num_queries: Any
) -> None:
    for author, text in ((bela, "First!"), (ada, "Thanks.")):
        written(dunes, author, text)
    # The photo joined with its album, tags, comments; from the global database the owner and the
    # authors.
    with (
        django_assert_num_queries(3, using="photos"),
        django_assert_num_queries(2, using="default"),
    ):
        page = browser.get(dunes.get_absolute_url())
    shown = [(c.author.username, c.text) for c in page.context["comments"]]
    assert shown == [("bela", "First!"), ("ada", "Thanks.")]
    assert str(dunes._state.db) in page.content.decode()


def test_comments_of_an_author_are_on_one_shard(
    browser: Client, lake: Photo, comment: Comment, apart: Any, django_assert_num_queries: Any
) -> None:
    second = written(lake, apart, "<b>Deep</b>")
    # Their number and the newest ones; from the global database the author and the owners of the
    # photos.
    with (
        django_assert_num_queries(2, using="photos"),
        django_assert_num_queries(2, using="default"),
    ):
        page = browser.get(f"/photos/{apart.username}/comments/")
    shown = page.context["page"].object_list
    assert [(c.pk, c.owner.username) for c in shown] == [(second.pk, "bela"), (comment.pk, "ada")]
    assert {c._state.db for c in shown} == {runtime.place("photos", apart.pk).alias}
    assert "&lt;b&gt;Deep" in page.content.decode()
    assert f"{lake.get_absolute_url()}#comment-{second.pk}" in page.content.decode()


def test_comment_lands_on_both_shards(as_bela: Client, ada: Any, bela: Any, dunes: Photo) -> None:
    path = dunes.get_absolute_url()
    form = {"text": "Where is this?", "csrfmiddlewaretoken": token(as_bela, path)}
    with committed():
        answer = as_bela.post(path, form)
    comment = Comment.objects.get(owner=ada)
    assert answer.status_code == 302
    assert answer.headers["Location"] == f"{path}#comment-{comment.pk}"
    assert (comment.author_id, comment.photo_id) == (bela.pk, dunes.pk)
    assert comment._state.db == dunes._state.db
    copy = WrittenComment.objects.get(author=bela)
    assert copy._state.db == runtime.place("photos", bela.pk).alias
    assert (copy.pk, copy.owner_id, copy.photo_id) == (comment.pk, ada.pk, dunes.pk)
    assert (copy.text, copy.posted_at) == (comment.text, comment.posted_at)
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


@pytest.mark.parametrize("who", ["author", "owner"])
def test_deleting_a_comment(
    browser: Client, ada: Any, dunes: Photo, comment: Comment, apart: Any, who: str
) -> None:
    browser.force_login(apart if who == "author" else ada)
    path = f"{dunes.get_absolute_url()}comments/{comment.pk}/delete/"
    assert path in browser.get(dunes.get_absolute_url()).content.decode()
    with committed():
        answer = browser.post(path, follow=True)
    assert "The comment is deleted." in answer.content.decode()
    assert not Comment.objects.filter(owner=ada).exists()
    assert copies(apart) == []


def test_deleting_what_is_not_ones_own(
    as_bela: Client, browser: Client, ada: Any, dunes: Photo, lake: Photo, comment: Comment
) -> None:
    path = f"{dunes.get_absolute_url()}comments/{comment.pk}/delete/"
    assert path not in as_bela.get(dunes.get_absolute_url()).content.decode()
    assert as_bela.post(path).status_code == 403  # without a token
    form = {"csrfmiddlewaretoken": token(as_bela, "/upload/")}
    assert as_bela.post(path, form).status_code == 404
    # Below a photo of her own, but the comment is not on it.
    other = f"{lake.get_absolute_url()}comments/{comment.pk}/delete/"
    assert as_bela.post(other, form).status_code == 404
    # To the photo, as the address of the form takes no GET.
    assert browser.post(path).headers["Location"] == f"/login/?next={dunes.get_absolute_url()}"
    assert as_bela.get(path).status_code == 405
    assert Comment.objects.filter(owner=ada).exists()


def test_comment_on_a_photo_that_is_deleted_meanwhile(
    as_bela: Client, ada: Any, bela: Any, dunes: Photo, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = dunes.get_absolute_url()
    form = {"text": "Late", "csrfmiddlewaretoken": token(as_bela, path)}
    save = Comment.save

    def late(comment: Comment, **options: Any) -> None:
        Photo.objects.filter(owner=ada, pk=dunes.pk).delete()
        with transaction.atomic(using="photos"):
            save(comment, **options)
            # The commit does this outside of a test, on databases that check constraints at commit.
            connections[str(dunes.shard_alias)].check_constraints()

    monkeypatch.setattr(Comment, "save", late)
    assert as_bela.post(path, form).status_code == 404
    assert not Comment.objects.filter(owner=ada).exists()
    assert copies(bela) == []


def test_comment_that_cannot_be_stored_is_no_missing_photo(
    as_bela: Client, dunes: Photo, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = dunes.get_absolute_url()
    form = {"text": "Hi", "csrfmiddlewaretoken": token(as_bela, path)}

    def taken(comment: Comment, **options: Any) -> None:
        raise IntegrityError("an id twice")

    monkeypatch.setattr(Comment, "save", taken)
    with pytest.raises(IntegrityError):
        as_bela.post(path, form)


def test_whose_account_is_closed_is_linked_nowhere(
    browser: Client, ada: Any, bela: Any, dunes: Photo, lake: Photo
) -> None:
    written(dunes, bela, "First!")
    written(lake, ada, "Second.")
    type(bela).objects.filter(pk=bela.pk).update(is_active=False)
    for page in (dunes.get_absolute_url(), "/photos/ada/comments/"):
        shown = browser.get(page).content.decode()
        assert "First!" in shown or "Second." in shown
        assert "/photos/bela/" not in shown


# -- The author's side follows the comment


def test_a_deleted_photo(dunes: Photo, comment: Comment, apart: Any) -> None:
    with committed():
        dunes.delete()
    assert copies(apart) == []


def test_a_changed_comment(dunes: Photo, comment: Comment, apart: Any) -> None:
    with committed():
        Comment.objects.filter(owner=dunes.owner_id).update(text="Found it.")
    assert copies(apart) == [(comment.pk, "Found it.")]


def test_another_author(dunes: Photo, comment: Comment, apart: Any, bela: Any) -> None:
    with committed():
        Comment.objects.filter(owner=dunes.owner_id).update(author=bela)
    assert (copies(apart), copies(bela)) == ([], [(comment.pk, "Where is this?")])


def test_the_author_has_only_a_copy(comment: Comment, apart: Any) -> None:
    copy = apart.written_comments.get()
    with pytest.raises(MirrorReadOnly, match="is a mirror of"):
        copy.delete()
