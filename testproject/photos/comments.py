"""Comments, stored twice: with the photo's owner and with the author (Yupoo, Y5 and Y6).

The page of a photo and the page "comments by" of an author then query one shard each. Both copies
are written in one block over the group. Its transactions commit one after the other, first the
one on the shard of the photo's owner. That copy decides:

- Code that writes comments alone, as pages of the admin do, or deletes a photo with its comments,
  calls :func:`settle` for the author's copies.
- If a process dies between the two commits of :func:`write`, the comment is shown with the photo
  and missing among those of its author. If it dies between those of :func:`remove`, the author's
  copy of a deleted comment remains. The same remains if it dies before :func:`settle`.
- :func:`check` finds both, and copies that differ, and repairs them;
  ``manage.py check_comments --repair`` from time to time is enough.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

from django.db import transaction

from sharded_orm import runtime
from sharded_orm.exceptions import PartialCommitError
from testproject.photos.models import Comment, WrittenComment

logger = logging.getLogger(__name__)

GROUP = "photos"
BATCH = 200  # comments that are compared at once
MISSING, DIFFERENT, LEFT_OVER = "missing", "different", "left over"


def write(comment: Comment) -> None:
    """Store both copies of a new comment; none if a statement or the first commit fails.

    On SQLite a shard is locked as a whole: two comments between the same two shards, written at the
    same moment in opposite directions, may wait until one gives up.
    """
    with _both_sides():
        comment.save(force_insert=True)
        _copy_of(comment).save(force_insert=True)


def remove(comment: Comment) -> None:
    """Delete both copies of a comment; none if a statement or the first commit fails."""
    copies = WrittenComment.objects.filter(author=comment.author_id, pk=comment.pk)
    with _both_sides():
        comment.delete()
        copies.delete()


@contextmanager
def _both_sides() -> Iterator[None]:
    """Open one block over both shards; the shard that is used first in it commits first."""
    try:
        with transaction.atomic(using=GROUP):
            yield
    except PartialCommitError as exc:
        # The user sees success, as the copy that decides is stored. The other copy will be
        # repaired.
        logger.warning("a comment's sides differ until they are checked: %s", exc)


@dataclass(frozen=True)
class Difference:
    """A comment whose two copies differ."""

    what: str
    comment_id: int
    owner_id: int
    author_id: int

    def __str__(self) -> str:
        reason = {
            MISSING: "has no copy with its author",
            DIFFERENT: "is not what the copy of its author says",
            LEFT_OVER: "is gone, but its author has a copy",
        }[self.what]
        return (
            f"comment {self.comment_id} (on a photo of user {self.owner_id},"
            f" by user {self.author_id}) {reason}"
        )


def settle(alias: str, named: Iterable[tuple[int, int]]) -> None:
    """Update the authors' copies of comments on the shard ``alias``. May be called again.

    Works author by author, so that a block is over two shards.

    :param named: author and id of each comment, including new and deleted ones. A comment with a
        new
        author is named with both authors.
    """
    for author_id, pairs in groupby(sorted(set(named)), key=itemgetter(0)):
        ids = [comment_id for _, comment_id in pairs]
        with transaction.atomic(using=GROUP):
            # Locked until the end of the block: a comment that is deleted meanwhile must not get a
            # copy.
            comments = Comment.objects.using(alias).select_for_update()
            stored = list(comments.filter(author=author_id, pk__in=ids))
            WrittenComment.objects.filter(author=author_id, pk__in=ids).delete()
            # A process that has just committed the comment may be about to commit its copy.
            WrittenComment.objects.bulk_create(map(_copy_of, stored), ignore_conflicts=True)


def check(*, repair: bool = False) -> Iterator[Difference]:
    """Compare all comments with their copies, shard by shard.

    Costs a query per shard and side, and for each :data:`BATCH` of comments one more on every shard
    that may have the other copy. Comments may be written meanwhile.

    :param repair: whether each difference is repaired before it is yielded.
    """
    aliases = [shard.alias for shard in runtime.group(GROUP).shards()]
    for alias in aliases:
        for copies in _pages(WrittenComment, alias):
            # The comments are queried after their copies: a comment commits before its copy does,
            # so a comment that is missing now has been deleted.
            differences = list(_left_over(copies))
            if repair:
                ids = [difference.comment_id for difference in differences]
                WrittenComment.objects.using(alias).filter(pk__in=ids).delete()
            yield from differences

    for alias in aliases:
        for comments in _pages(Comment, alias):
            differences = list(_compared(comments))
            if repair:
                settle(
                    alias,
                    ((difference.author_id, difference.comment_id) for difference in differences),
                )
            yield from differences


def _compared(comments: list[Comment]) -> Iterator[Difference]:
    copies = WrittenComment.objects.uncached().filter(
        author__in={c.author_id for c in comments}, pk__in=[c.pk for c in comments]
    )
    copies_by_id = {copy.pk: copy for copy in copies}
    for comment in comments:
        copy = copies_by_id.get(comment.pk)
        if copy is None:
            yield _difference(MISSING, comment)
        elif _content(copy) != _content(_copy_of(comment)):
            yield _difference(DIFFERENT, comment)


def _left_over(copies: list[WrittenComment]) -> Iterator[Difference]:
    comments = Comment.objects.uncached().filter(
        owner__in={c.owner_id for c in copies}, pk__in=[c.pk for c in copies]
    )
    stored = {(c.pk, c.author_id) for c in comments}
    return (_difference(LEFT_OVER, c) for c in copies if (c.pk, c.author_id) not in stored)


def _pages(model: type[Any], alias: str) -> Iterator[list[Any]]:
    rows, last = model.objects.using(alias).uncached().order_by("pk"), 0
    while page := list(rows.filter(pk__gt=last)[:BATCH]):
        yield page
        last = page[-1].pk


def _copy_of(comment: Comment) -> WrittenComment:
    return WrittenComment(
        comment_id=comment.pk,
        author_id=comment.author_id,
        owner_id=comment.owner_id,
        photo_id=comment.photo_id,
        text=comment.text,
        posted_at=comment.posted_at,
    )


def _content(copy: WrittenComment) -> tuple[Any, ...]:
    return copy.author_id, copy.owner_id, copy.photo_id, copy.text, copy.posted_at


def _difference(what: str, row: Comment | WrittenComment) -> Difference:
    return Difference(what, row.pk, row.owner_id, row.author_id)
