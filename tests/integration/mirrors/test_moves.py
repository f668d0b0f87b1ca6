"""Keys of sources and of mirrors move, while rows wait in outboxes and deliveries are late."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.integration.mirrors.site import PREAMBLE, Site
from tests.integration.stopped_process import go_on, wait_until_stopped
from tests.patience import PATIENCE

_LATE = """
from sharded_orm.contrib.mirrors import capture, delivery
capture.TransactionChanges.deliver_after_commit = lambda *ignored: None
"""


def _move(site: Site, key: int, shard: int) -> None:
    done = site.manage("keys", "move", "books", str(key), "--to", str(shard), "--keep", "0")
    assert "has no model" not in done.out + done.err


def _move_at_last(site: Site, key: int, shard: int) -> None:
    """Move a key of a mirror while its rows change their keys.

    The move is refused, or given up, while the new shard has such a row under its former key, which a relay
    has not removed yet.
    """
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        done = site.python(
            *("manage.py", "keys", "move", "books", str(key), "--to", str(shard), "--keep", "0")
        )
        said = done.out + done.err
        if "has ids or unique values" not in said and "IntegrityError" not in said:
            assert done.code == 0, said
            return
    raise AssertionError(said)


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


def test_a_move_waits_for_the_relay_to_remove_rows_with_former_keys(site: Site) -> None:
    site.run(
        """
from django.db import OperationalError
from sharded_orm.contrib.mirrors import delivery
note(1, 2, note_id=100)
write_rows = delivery.write_rows
def refused_by_one_shard(mirror, alias, rows, **options):
    if alias == "books_00002":
        raise OperationalError("down")
    write_rows(mirror, alias, rows, **options)
delivery.write_rows = refused_by_one_shard
Note.objects.filter(owner_id=1).update(author_id=7)
"""
    )
    error = site.manage("keys", "move", "books", "7", "--to", "2", "--keep", "0", code=1).err
    assert "notes_writtennote (note_id) of row 100" in error
    assert "run 'manage.py mirrors relay --once'" in error
    assert "ticket servers" not in error
    site.manage("mirrors", "relay", "--once")
    _move(site, 7, 2)
    assert site.run("print(rows(WrittenNote, 'author_id'), differences())") == "[(7,)] []"


#: Writes rows of a source while its key and those of its mirrors move. One process in two delivers nothing.
_TELLER = """
import json, os
from sharded_orm.contrib.mirrors import capture, transaction as parts
from sharded_orm.exceptions import KeyMoved
from django.db import OperationalError
if {silent}:
    capture.TransactionChanges.deliver_after_commit = lambda *ignored: None
versions, sunk, written, record = {{}}, [], [], parts.record
def recorded(*arguments):
    written.append(record(*arguments))
    return written[-1]
parts.record = recorded
def compare_versions():
    for entries in written:
        for entry in entries():
            pk = entry.written.pk
            if versions.get(pk, -1) >= entry.version:
                sunk.append((pk, versions[pk], entry.version))
            versions[pk] = entry.version
    written.clear()

me, owner, n, moved, acknowledged = {me}, {owner}, 0, 0, {{}}
def write(pk, author, text):
    own = Note.objects.filter(owner_id=owner, pk=pk)
    if pk not in acknowledged:
        note(owner, author, text, note_id=pk)
    elif n % 4 == 0:
        own.delete()
        return None
    elif n % 4 == 1:
        own.update(author_id=author, text=text)
    elif n % 4 == 2:
        with transaction.atomic(using="books"):
            row = own.select_for_update().get()
            row.author_id, row.text = author, text
            row.save()
    else:
        row = own.get()
        row.author_id, row.text = author, text
        Note.objects.bulk_update([row], ["author_id", "text"])
    return [author, text]
while not os.path.exists({stop!r}):
    n += 1
    pk = me * 1000 + n % 7
    written.clear()  # Of what was not committed.
    try:
        acknowledged[pk] = write(pk, 5 + n % 3, f"{{me}} {{n}}")
    except KeyMoved:  # Nothing was written.
        moved += 1
        continue
    except OperationalError as error:
        if error.args[0] != 1213:  # A deadlock.
            raise
        continue
    compare_versions()
    if acknowledged[pk] is None:
        del acknowledged[pk]
print(json.dumps([sorted([pk, *row] for pk, row in acknowledged.items()), sunk, n]))
"""


@pytest.mark.long
def test_a_bank_with_mirrors(site: Site, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    tellers = [
        site.start(
            "run",
            PREAMBLE + _TELLER.format(me=me, owner=1 + me % 2, silent=me > 2, stop=str(stop)),
        )
        for me in range(1, 5)
    ]
    relay = site.start("manage.py", "mirrors", "relay", "--interval", "0.1")
    try:
        for key, shard in ((6, 3), (1, 0), (5, 0), (6, 0), (1, 3), (2, 1), (1, 1), (6, 2)):
            _move_at_last(site, key, shard)
    finally:
        stop.touch()
        relay.terminate()
    results = []
    for process in (*tellers, relay):
        out, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, err
        results.append(out)
    banks = [json.loads(out) for out in results[:-1]]
    assert [sunk for _, sunk, _ in banks] == [[]] * 4
    assert all(writes > 20 for _, _, writes in banks)
    site.manage("mirrors", "relay", "--once")
    written = sorted(row for rows, _, _ in banks for row in rows)
    stored = site.run(
        "import json; print(json.dumps([rows(m, 'pk', 'author_id', 'text') for m in (Note, WrittenNote)]))"
    )
    assert json.loads(stored) == [written, written]
    assert site.run("print(differences(), outbox())") == "[] 0"
    assert ", 0 differ." in site.manage("mirrors", "check").out


#: Inserts a row, and stops after the commit, before the delivery.
_SUSPENDED = """
import os, signal
from sharded_orm.contrib.mirrors import transaction as parts
deliver = parts.deliver
def late(*call):
    os.kill(os.getpid(), signal.SIGSTOP)
    return deliver(*call)
parts.deliver = late
note(1, 5, "first", note_id=100)
"""


@pytest.mark.parametrize(
    ("later", "stored"),
    [
        pytest.param('update(text="second")', "[(5, 'second')]", id="changed"),
        pytest.param("delete()", "[]", id="deleted"),
        pytest.param(
            'update(text="second", author_id=6)',
            "[(6, 'second')]",
            id="under-another-key",
            marks=pytest.mark.long,
        ),
    ],
)
def test_an_insert_is_delivered_after_its_mirrors_key_has_moved(
    site: Site, later: str, stored: str
) -> None:
    """The versions of the row have stayed on the former shard, so the new one cannot refuse what is old."""
    process = site.start("run", PREAMBLE + _SUSPENDED)
    wait_until_stopped(process)
    site.run(f"Note.objects.filter(owner_id=1).{later}")
    site.manage("mirrors", "relay", "--once")
    _move(site, 5, 3)
    out, err = go_on(process)
    assert process.returncode == 0, out + err
    assert site.run("print(rows(WrittenNote, 'author_id', 'text'), differences())") == (
        f"{stored} []"
    )
