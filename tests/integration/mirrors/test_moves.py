"""Keys of sources and of mirrors move, while rows wait in outboxes and deliveries are late."""

from __future__ import annotations

import pytest

from tests.integration.mirrors.site import PREAMBLE, Site
from tests.patience import PATIENCE

_LATE = """
from sharded_orm.contrib.mirrors import capture, delivery
capture.TransactionChanges.deliver_after_commit = lambda *ignored: None
"""


def _move(site: Site, key: int, shard: int) -> None:
    done = site.manage("keys", "move", "books", str(key), "--to", str(shard), "--keep", "0")
    assert "has no model" not in done.out + done.err


def test_rows_in_an_outbox_are_delivered_to_where_the_keys_are(site: Site) -> None:
    site.run(
        _LATE
        + """
n = note(1, 2, "first", note_id=100)
m = note(1, 3, "deleted", note_id=101)
"""
    )
    _move(site, 1, 0)  # The source.
    site.run(
        _LATE + 'Note.objects.filter(owner_id=1, text="first").update(text="second", author_id=6)'
    )
    site.run(_LATE + 'Note.objects.filter(owner_id=1, text="deleted").delete()')
    _move(site, 6, 3)  # The mirror's new key.
    site.manage("mirrors", "relay", "--once")
    assert site.run("print(rows(WrittenNote, 'author_id', 'text'), differences(), outbox())") == (
        "[(6, 'second')] [] 0"
    )
    _move(site, 6, 1)
    _move(site, 1, 2)
    out = site.run("""
Note.objects.filter(owner_id=1).update(text="third")
print(rows(WrittenNote, "author_id", "text"), differences())
""")
    assert out == "[(6, 'third')] []"
    site.manage("mirrors", "check")


@pytest.mark.long
def test_keys_move_while_sources_are_written(site: Site) -> None:
    program = """
import random
notes = [note({owner}, 6, note_id={owner} * 1000 + number) for number in range(3)]
for number in range(60):
    n = random.choice(notes)
    n.author_id, n.text = random.choice([5, 6, 7]), f"{owner} {{number}}"
    n.save()
"""
    writers = [site.start("run", PREAMBLE + program.format(owner=owner)) for owner in (1, 2)]
    for key, shard in ((6, 3), (1, 0), (6, 0)):
        _move(site, key, shard)
    for process in writers:
        _, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, err
    site.manage("mirrors", "relay", "--once")
    assert site.run("print(len(rows(WrittenNote, 'pk')), differences(), outbox())") == "6 [] 0"
