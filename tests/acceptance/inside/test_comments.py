"""Comments, which are stored for the photo and for the author."""

from __future__ import annotations

from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import IntegrityError, connections, transaction
from django.test import Client

from sharded_orm import runtime
from testproject.photos import comments
from testproject.photos.models import Comment, Photo, WrittenComment
from tests.acceptance.inside.pages import token

pytestmark = pytest.mark.django_db(
    databases=["default", "directory", "tickets_1", "tickets_2", "photos"]
)


@pytest.fixture
def comment(dunes: Photo, apart: Any) -> Comment:
    return written(dunes, apart, "Where is this?")


def written(photo: Photo, author: Any, text: str) -> Comment:
    comment = Comment(owner_id=photo.owner_id, photo=photo, author=author, text=text)
    comments.write(comment)
    return comment


def found(*, repair: bool = False) -> list[tuple[str, int]]:
    return [(each.what, each.comment_id) for each in comments.check(repair=repair)]


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
    assert found() == []


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


def test_a_side_that_cannot_be_stored_takes_the_other_back(
    dunes: Photo, comment: Comment, apart: Any
) -> None:
    WrittenComment.objects.create(
        comment_id=777_777, author=apart, owner_id=1, photo_id=1, text="In the way",
        posted_at=comment.posted_at,
    )  # fmt: skip
    again = Comment(
        comment_id=777_777, owner_id=dunes.owner_id, photo=dunes, author=apart, text="x"
    )
    with pytest.raises(IntegrityError), transaction.atomic(using="photos"):
        comments.write(again)
    assert not Comment.objects.filter(owner=dunes.owner_id, pk=777_777).exists()


@pytest.mark.parametrize("who", ["author", "owner"])
def test_deleting_a_comment(
    browser: Client, ada: Any, dunes: Photo, comment: Comment, apart: Any, who: str
) -> None:
    browser.force_login(apart if who == "author" else ada)
    path = f"{dunes.get_absolute_url()}comments/{comment.pk}/delete/"
    assert path in browser.get(dunes.get_absolute_url()).content.decode()
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
    write = comments.write

    def late(comment: Comment) -> None:
        Photo.objects.filter(owner=ada, pk=dunes.pk).delete()
        with transaction.atomic(using="photos"):
            write(comment)
            # The commit does this outside of a test, on databases that check constraints at commit.
            connections[str(dunes.shard_alias)].check_constraints()

    monkeypatch.setattr(comments, "write", late)
    assert as_bela.post(path, form).status_code == 404
    assert not Comment.objects.filter(owner=ada).exists()
    assert copies(bela) == []


def test_comment_that_cannot_be_stored_is_no_missing_photo(
    as_bela: Client, dunes: Photo, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = dunes.get_absolute_url()
    form = {"text": "Hi", "csrfmiddlewaretoken": token(as_bela, path)}

    def taken(comment: Comment) -> None:
        raise IntegrityError("an id twice")

    monkeypatch.setattr(comments, "write", taken)
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


# -- Comments that only one side has, and their repair


def test_check_finds_what_one_side_lost(dunes: Photo, comment: Comment, apart: Any) -> None:
    WrittenComment.objects.filter(author=apart).delete()
    assert found() == [(comments.MISSING, comment.pk)]
    assert found(repair=True) == [(comments.MISSING, comment.pk)]
    assert found() == []
    assert copies(apart) == [(comment.pk, "Where is this?")]


def test_check_finds_what_is_left_of_a_deleted_photo(
    dunes: Photo, comment: Comment, apart: Any
) -> None:
    dunes.delete()
    assert found() == found(repair=True) == [(comments.LEFT_OVER, comment.pk)]
    assert found() == []
    assert copies(apart) == []


def test_check_finds_what_was_changed_on_one_side(
    dunes: Photo, comment: Comment, apart: Any
) -> None:
    Comment.objects.filter(owner=dunes.owner_id).update(
        text="Found it.", posted_at=comment.posted_at + timedelta(days=1)
    )
    assert found() == found(repair=True) == [(comments.DIFFERENT, comment.pk)]
    assert found() == []
    assert copies(apart) == [(comment.pk, "Found it.")]


def test_check_finds_a_comment_of_another_author_now(
    dunes: Photo, comment: Comment, apart: Any, bela: Any
) -> None:
    Comment.objects.filter(owner=dunes.owner_id).update(author=bela)
    expected = {(comments.LEFT_OVER, comment.pk), (comments.MISSING, comment.pk)}
    assert set(found()) == set(found(repair=True)) == expected
    assert found() == []
    assert (copies(apart), copies(bela)) == ([], [(comment.pk, "Where is this?")])


def test_check_in_several_batches(
    monkeypatch: pytest.MonkeyPatch, dunes: Photo, lake: Photo, ada: Any, bela: Any, apart: Any
) -> None:
    monkeypatch.setattr(comments, "BATCH", 2)
    for photo in (dunes, lake):
        Comment.objects.bulk_create(
            Comment(owner_id=photo.owner_id, photo=photo, author=author, text=str(number))
            for number in range(3)
            for author in (ada, bela, apart)
        )
    assert len(found(repair=True)) == 18
    assert found() == []
    assert [len(copies(author)) for author in (ada, bela, apart)] == [6, 6, 6]


def test_command(dunes: Photo, comment: Comment, apart: Any) -> None:
    WrittenComment.objects.filter(author=apart).delete()
    said = StringIO()
    with pytest.raises(CommandError, match="1 differences; --repair"):
        call_command("check_comments", stdout=said)
    assert f"comment {comment.pk} (on a photo of user {dunes.owner_id}" in said.getvalue()
    call_command("check_comments", repair=True, stdout=said)
    assert said.getvalue().rstrip().endswith("has no copy with its author: repaired")
    call_command("check_comments", stdout=said)
    assert "agree" in said.getvalue()
