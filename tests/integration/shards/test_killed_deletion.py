"""A deletion with ``sharded_orm.on_delete`` whose process is killed."""

from __future__ import annotations

from tests.integration.shards.conftest import Fleet

#: A child deletes the author, and is killed when the books on the shard are deleted for good and the
#: deletion of the author is not committed. Then the parent deletes it again.
KILLED = """
import os, signal
import django
django.setup()
from django.db import connections
from tests.authors.models import Author, Book, Page

def rows():
    keys = [sorted(row.author_id for row in model.objects.scatter()) for model in (Book, Page)]
    return [*keys, sorted(Author.objects.values_list("pk", flat=True))]

def killing(execute, sql, params, many, context):
    result = execute(sql, params, many, context)
    if sql.startswith("DELETE") and "authors_author" in sql:
        os.kill(os.getpid(), signal.SIGKILL)
    return result

for key in (7, 8):
    author = Author.objects.create(id=key)
    book = Book.objects.create(id=key, author=author)
    Page.objects.create(id=key, author=author, book=book)
connections.close_all()
child = os.fork()
if not child:
    try:
        with connections["default"].execute_wrapper(killing):
            Author.objects.get(pk=7).delete()
    finally:
        os._exit(0)
_, status = os.waitpid(child, 0)
print(os.WTERMSIG(status), rows())
print(Author.objects.get(pk=7).delete(), rows())
"""


def test_a_deletion_that_was_killed_between_two_commits_is_run_again(authors_fleet: Fleet) -> None:
    """The rows on the shard go first, so no row refers to an author that does not exist."""
    fleet = authors_fleet
    for key in (7, 8):
        fleet.place(key, 3)
    killed = fleet.python("-c", KILLED)
    assert killed.code == 0, killed.err
    after_kill, after_deletion = killed.out.splitlines()
    assert after_kill == "9 [[8], [8], [7, 8]]"
    assert after_deletion == "(1, {'authors.Author': 1}) [[8], [8], [8]]"
    report = fleet.json("check", "--all")
    assert report["cross_key"] == report["dangling"] == report["problems"] == []
