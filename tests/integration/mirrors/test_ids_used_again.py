"""The numbers of two shards cannot be compared, so an id that is used again is decided by the source."""

from __future__ import annotations

import pytest

from tests.integration.mirrors.site import Site

_LATE = """
from sharded_orm.contrib.mirrors import capture
delivered_by_writer = capture.TransactionChanges.deliver_after_commit
def by_relays():
    capture.TransactionChanges.deliver_after_commit = lambda *ignored: None
n = note({owner}, note_id=100, text="first")
for text in ("second", "third", "fourth"):
    n.text = text
    n.save()
"""


# Relays begin with the shard of 1.
@pytest.mark.parametrize("owner", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_row_under_another_shard_key_replaces_a_deleted_one(site: Site, owner: int) -> None:
    other = 3 - owner
    site.run(
        _LATE.format(owner=owner)
        + f"""
by_relays()
n.delete()
again = note({other}, note_id=100, text="again")
"""
    )
    site.manage("mirrors", "relay", "--once")
    assert site.run("print(rows(WrittenNote, 'owner_id', 'text'), differences(), outbox())") == (
        f"[({other}, 'again')] [] 0"
    )


def test_both_keys_are_on_one_shard_and_one_of_them_has_moved(site: Site) -> None:
    """Its versions are higher, although its numbers are lower."""
    site.run(
        """
from sharded_orm.contrib.mirrors.declaration import Source
Source.epoch_of = lambda source, key: 2 if key == 1 else 0
"""
        + _LATE.format(owner=1)
        + """
by_relays()
n.delete()
again = note(5, note_id=100, text="again")
"""
    )
    site.manage("mirrors", "relay", "--once")
    assert site.run("print(rows(WrittenNote, 'owner_id', 'text'), differences(), outbox())") == (
        "[(5, 'again')] [] 0"
    )


def test_the_writer_delivers_it_at_once(site: Site) -> None:
    out = site.run(
        _LATE.format(owner=1)
        + """
n.delete()
again = note(2, note_id=100, text="again")
print(differences())
again.delete()
print(rows(WrittenNote, "pk"), differences())
back = note(1, 7, note_id=100, text="back")
print(rows(WrittenNote, "author_id", "text"), differences())
"""
    )
    assert out.splitlines() == ["[]", "[] []", "[(7, 'back')] []"]


def test_while_both_exist_the_second_one_waits(site: Site) -> None:
    """Neither of them is lost in silence."""
    site.run(_LATE.format(owner=1) + 'note(2, note_id=100, text="again")')
    assert site.run("print(rows(WrittenNote, 'text'))") == "[('fourth',)]"
    done = site.manage("mirrors", "relay", "--once", code=1)
    assert "Note(pk=100)" in done.err and "under the shard keys 1 and 2" in done.err
    site.run("QuerySet(OutboxRow, using='books_00002').update(attempts=10)")  # Now a dead letter.
    done = site.manage("mirrors", "check", "--repair", "WrittenNote", code=1)
    assert "under the shard keys 1 and 2" in done.err
    site.run("Note.objects.filter(owner_id=1).delete()")
    site.manage("mirrors", "relay", "--once", "--retry-dead")
    assert site.run("print(rows(WrittenNote, 'text'), differences(), outbox())") == (
        "[('again',)] [] 0"
    )


@pytest.mark.long
def test_a_check_mends_it(site: Site) -> None:
    """As after raw SQL, which leaves nothing in the outbox."""
    site.run(
        _LATE.format(owner=1)
        + """
by_relays()
n.delete()
note(2, note_id=100, text="again")
for alias in aliases("books"):
    QuerySet(OutboxRow, using=alias)._raw_delete(alias)
"""
    )
    site.manage("mirrors", "check", "--repair", "WrittenNote")
    site.manage("mirrors", "check", "WrittenNote")
    assert site.run("print(rows(WrittenNote, 'owner_id', 'text'))") == "[(2, 'again')]"


_MOVE = ("keys", "move", "books", "6", "--to", "3", "--keep", "0")


@pytest.mark.parametrize(
    ("late", "says_key"),
    [
        pytest.param("n.delete()", True, id="deleted"),
        pytest.param("n.delete()", False, id="deleted-without-source-key"),
        pytest.param("n.save(); n.delete()", True, id="changed", marks=pytest.mark.long),
    ],
)
def test_the_versions_have_stayed_on_the_former_shard_of_the_mirrors_key(
    site: Site, late: str, says_key: bool
) -> None:
    """What is late does not remove the row of the other shard key, whether or not the mirror copies that key."""
    site.run(
        f"""
from sharded_orm.contrib.mirrors import capture
deliver = capture.TransactionChanges.deliver_after_commit
n = note(1, 6, "first", note_id=100)
capture.TransactionChanges.deliver_after_commit = lambda *ignored: None
{late}
capture.TransactionChanges.deliver_after_commit = deliver
note(2, 6, "again", note_id=100)
QuerySet(OutboxRow, using="books_00002")._raw_delete("books_00002")  # As a relay does that comes now.
"""
    )
    site.manage(*_MOVE)
    site.run(
        f"""
from sharded_orm.contrib.mirrors import relay
from sharded_orm.contrib.mirrors.declaration import Mirror
if not {says_key}:
    Mirror.own_source_key = None
assert not relay.relay(min_age=0).problems
"""
    )
    assert site.run("print(rows(WrittenNote, 'owner_id', 'text'), differences(), outbox())") == (
        "[(2, 'again')] [] 0"
    )


def test_the_second_one_waits_after_a_move_too(site: Site) -> None:
    site.run('note(1, 6, "first", note_id=100)\nnote(2, 6, "again", note_id=100)')
    site.manage("mirrors", "relay", "--once", code=1)  # Only the second one is left.
    site.manage(*_MOVE)
    done = site.manage("mirrors", "relay", "--once", code=1)
    assert "Note(pk=100)" in done.err and "under the shard keys 1 and 2" in done.err
    assert site.run("print(rows(WrittenNote, 'text'))") == "[('first',)]"
    site.run("Note.objects.filter(owner_id=1).delete()")
    site.manage("mirrors", "relay", "--once")
    assert site.run("print(rows(WrittenNote, 'text'), differences(), outbox())") == (
        "[('again',)] [] 0"
    )
