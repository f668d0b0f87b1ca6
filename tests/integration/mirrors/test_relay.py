"""What writers leave in the outboxes, relays deliver: late, twice, in any order, and after kills."""

from __future__ import annotations

import secrets
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integration.mirrors.site import PREAMBLE, Site
from tests.patience import PATIENCE
from tests.services import mariadb

#: The process dies at the end of that call, in the second or third write of the program.
WRITER_DIES = [
    "sharded_orm.contrib.mirrors.transaction.record:3",
    "sharded_orm.contrib.mirrors.delivery._deliver_to:5",
    "sharded_orm.contrib.mirrors.mirror_rows._insert_versions:5",
    "sharded_orm.contrib.mirrors.mirror_rows._insert:5",
    "sharded_orm.contrib.mirrors.delivery.read_source:5",
    "sharded_orm.contrib.mirrors.transaction.deliver:3",
]
_PROGRAM = """
n = note(1, 2, "first")
n.author_id, n.text = 3, "second"
n.save()
note(4, 5, "third")
"""
RELAY_DIES = [
    "sharded_orm.operations.runs.journal.take_lease:1",
    "sharded_orm.contrib.mirrors.delivery.read_source:1",
    "sharded_orm.contrib.mirrors.mirror_rows._lock_versions:1",
    "sharded_orm.contrib.mirrors.mirror_rows._write_locked:1",
    "sharded_orm.contrib.mirrors.delivery.write_rows:1",
    "sharded_orm.contrib.mirrors.relay.deliver:1",
    "sharded_orm.contrib.mirrors.relay.remove:1",
]
#: Nobody delivers after the commit, as if each writer died there.
UNDELIVERED = """
from sharded_orm.contrib.mirrors import capture
capture.TransactionChanges.deliver_after_commit = lambda *ignored: None
"""


def _first_two(moments: list[str]) -> list[Any]:
    """The others are for long runs."""
    return [*moments[:2], *(pytest.param(moment, marks=pytest.mark.long) for moment in moments[2:])]


@pytest.mark.parametrize("moment", _first_two(WRITER_DIES))
def test_a_relay_delivers_what_a_killed_writer_has_committed(site: Site, moment: str) -> None:
    done = site.python("run", PREAMBLE + _PROGRAM, KILL_AT=moment)
    assert done.code == -signal.SIGKILL, f"{moment} did not come: {done.out} {done.err}"
    site.manage("mirrors", "relay", "--once")
    # "second" was committed in any case.
    assert site.run("print(rows(WrittenNote, 'text')[0], differences(), outbox())") == (
        "('second',) [] 0"
    )


@pytest.mark.parametrize("moment", _first_two(RELAY_DIES))
def test_a_relay_goes_on_after_a_killed_one(site: Site, moment: str) -> None:
    site.run(UNDELIVERED + _PROGRAM)
    done = site.python("manage.py", "mirrors", "relay", "--once", KILL_AT=moment)
    assert done.code == -signal.SIGKILL, f"{moment} did not come: {done.out} {done.err}"
    site.manage("mirrors", "relay", "--once")
    assert site.run("print(rows(WrittenNote, 'author_id', 'text'), differences(), outbox())") == (
        "[(3, 'second'), (5, 'third')] [] 0"
    )


#: Writes rows, delivers what was written so far in calls that arrive later, in another order and twice.
_STORM = """
import random
from sharded_orm.contrib.mirrors import delivery, mirror_rows, relay
{ablation}
chance = random.Random({seed})
delayed = []
now = delivery.write_rows
delivery.write_rows = lambda *call, **kw: delayed.append(call)
notes = []
for number in range({count}):
    what = chance.random()
    if what < 0.3 or not notes:
        notes.append(note(chance.randint(1, 8), chance.choice([None, *range(1, 9)]), f"t{{number}}"))
        continue
    n = chance.choice(notes)
    if what < 0.4:
        pk = n.pk
        n.delete()
        n.pk = pk
        if what < 0.37:
            again = note(chance.randint(1, 8), n.author_id, f"again {{number}}", note_id=pk)
            notes[notes.index(n)] = again
        else:
            notes.remove(n)
    else:
        n.text, n.is_public = f"t{{number}}", chance.random() < 0.7
        if what < 0.7:
            n.author_id = chance.choice([None, *range(1, 9)])
        n.save()
    while delayed and chance.random() < 0.4:
        call = chance.choice(delayed)
        now(*call)
        if chance.random() < 0.7:
            delayed.remove(call)
delivery.write_rows = now
late = chance.sample(delayed, len(delayed) // 2)
for call in delayed:
    if call not in late:
        now(*call)
while relay.relay(min_age=0).delivered:
    pass
chance.shuffle(late)
for call in late:
    now(*call)
print(differences() == [], outbox())
"""
#: Versions under different shard keys are compared.
_NO_KEYS = "mirror_rows._key_text = lambda *ignored: None"
_NO_VERSIONS = """
original = mirror_rows._write_locked
def unguarded(mirror, alias, rows, unchanged):
    original(mirror, alias, rows, mirror_rows.stored_versions(mirror, alias, [row.pk for row in rows]))
mirror_rows._write_locked = unguarded
"""


def test_delayed_repeated_and_reordered_deliveries_do_no_harm(site: Site) -> None:
    assert site.run(_STORM.format(seed=1, count=150, ablation="")) == "True 0"


@pytest.mark.parametrize("ablation", [_NO_VERSIONS, _NO_KEYS], ids=["versions", "keys"])
def test_without_versions_they_do(site: Site, ablation: str) -> None:
    out = site.run(_STORM.format(seed=1, count=150, ablation=ablation))
    assert out == "False 0"


#: A relay removes rows from the outbox before it delivers them.
_EARLY_REMOVAL = """
from sharded_orm.contrib.mirrors import outbox as outboxes, relay
deliver = relay.deliver
def early(rows, mirrors):
    for alias in aliases("books"):
        outboxes.remove(alias, list(outboxes.outbox_rows(alias).values_list("pk", flat=True)))
    return deliver(rows, mirrors)
relay.deliver = early
"""


@pytest.mark.parametrize("is_early", [False, True])
def test_rows_leave_the_outbox_after_their_delivery(site: Site, is_early: bool) -> None:
    site.run(UNDELIVERED + _PROGRAM)
    ablation = _EARLY_REMOVAL if is_early else ""
    dies = """
import os, signal
from sharded_orm.contrib.mirrors import delivery, relay
delivery.write_rows = lambda *ignored: os.kill(os.getpid(), signal.SIGKILL)
relay.relay(min_age=0)
"""
    assert site.python("run", PREAMBLE + ablation + dies).code == -signal.SIGKILL
    site.manage("mirrors", "relay", "--once")
    assert site.run("print(differences() == [])") == str(not is_early)


#: The outbox is written by a transaction of its own, after that of the write.
_LATE_OUTBOX = """
from sharded_orm.contrib.mirrors import transaction as parts
record = parts.record
def late(source, alias, written):
    # Also called immediately before the COMMIT, when on_commit() refuses to be used.
    connections[alias].run_on_commit.append((set(), lambda: record(source, alias, written), False))
    return lambda: []
parts.record = late
"""


@pytest.mark.parametrize("is_late", [False, True])
def test_the_outbox_belongs_to_the_transaction_of_the_write(site: Site, is_late: bool) -> None:
    dies = "\nimport os, signal\ntransaction.on_commit(lambda: os.kill(os.getpid(), signal.SIGKILL), using='books_00001')\n"
    program = (
        f"with sharded_orm.atomic(Note, owner_id=1):{dies.replace(chr(10), chr(10) + '    ')}note()"
    )
    ablation = _LATE_OUTBOX if is_late else ""
    assert site.python("run", PREAMBLE + ablation + program).code == -signal.SIGKILL
    site.manage("mirrors", "relay", "--once")
    assert site.run("print(differences() == [])") == str(not is_late)


def test_two_relays_and_writers_at_once(site_everywhere: Site) -> None:
    program = """
import random
notes = [note({owner}, 1) for _ in range(3)]
for number in range(30):
    n = random.choice(notes)
    n.author_id, n.text = random.randint(1, 8), f"{owner} {{number}}"
    n.save()
"""
    silent = "delivery.deliver = capture.TransactionChanges.deliver_after_commit = lambda *ignored: None\n"
    setup = "from sharded_orm.contrib.mirrors import capture, delivery\n"
    writers = [
        site_everywhere.start(
            "run", PREAMBLE + (setup + silent if owner % 2 else "") + program.format(owner=owner)
        )
        for owner in (1, 2, 3, 4)
    ]
    relays = [
        site_everywhere.start("run", PREAMBLE + "from sharded_orm.contrib.mirrors import relay\n"
                   "for _ in range(10):\n    relay.relay(min_age=0)")
        for _ in range(2)
    ]  # fmt: skip
    for process in (*writers, *relays):
        _, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, err
    site_everywhere.manage("mirrors", "relay", "--once")
    assert (
        site_everywhere.run("print(len(rows(WrittenNote, 'pk')), differences(), outbox())")
        == "12 [] 0"
    )


def test_a_relay_leaves_a_shard_to_another_one(site: Site) -> None:
    site.run(UNDELIVERED + _PROGRAM)
    out = site.run("""
from sharded_orm.contrib.mirrors import relay
from sharded_orm.operations.runs import journal
lease, _ = journal.take_lease(relay.KIND, "books_00001", {})
report = relay.relay(min_age=0)
print(report.held, report.delivered)
lease.own_row().update(token="taken")
lease._lost = True
try:
    lease.check()
except sharded_orm.exceptions.LeaseLost:
    print("lost")
""")
    assert out.splitlines() == ["['books_00001'] 1", "lost"]


def test_what_a_mirror_refuses_becomes_a_dead_letter(site: Site) -> None:
    site.run("""
from sharded_orm.contrib.mirrors import delivery, relay
for alias in aliases("books"):
    with connections[alias].cursor() as cursor:
        cursor.execute("CREATE UNIQUE INDEX one_text ON notes_writtennote (text)")
note(1, 2, "same")
note(1, 2, "same")
note(1, 2, "other")
""")
    for _ in range(10):
        site.manage("mirrors", "relay", "--once", code=1)
    site.manage("mirrors", "relay", "--once")
    assert site.run("print(rows(WrittenNote, 'text'), outbox())") == ("[('other',), ('same',)] 1")
    status = site.manage("mirrors", "status", "--json", code=1)
    assert len(status.json["dead"]) == 1
    site.run("Note.objects.filter(owner_id=1, text='same').order_by('pk').first().delete()")
    site.manage("mirrors", "relay", "--once", "--retry-dead")
    assert site.run("print(differences(), outbox())") == "[] 0"


def test_a_race_does_not_make_a_dead_letter(site: Site) -> None:
    out = site.run("""
from sharded_orm.contrib.mirrors import mirror_rows, relay
n = note()
Note.objects.filter(owner_id=1).update(text="later")
mirror_rows._lock_versions = lambda *ignored: {}  # Others insert the versions after each look.
report = relay.relay(min_age=0)
print(report.failed, set(QuerySet(OutboxRow, using="books_00001").values_list("attempts", flat=True)))
""")
    assert out == "2 {0}"


def test_writes_are_accepted_while_the_shard_of_the_mirror_is_down(
    site: Site, tmp_path: Path
) -> None:
    if site.backend != "sqlite3":
        pytest.skip("here the file of a shard is taken away; servers are killed in long runs")
    file, away = site.folder / "db2" / "books_00002.sqlite3", tmp_path / "away"
    file.rename(away)
    out = site.run("""
n, m = note(1, 2, "waits"), note(1, 5, "is there")
print(Note.objects.filter(owner_id=1).count(), [row.text for row in WrittenNote.objects.filter(author_id=5)])
""")
    assert out == "2 ['is there']"
    done = site.manage("mirrors", "relay", "--once", code=1)
    assert "books_00002" in done.err
    away.rename(file)
    site.manage("mirrors", "relay", "--once")
    assert site.run("print(rows(WrittenNote, 'text'), differences(), outbox())") == (
        "[('is there',), ('waits',)] [] 0"
    )


def test_a_relay_goes_on_until_it_is_stopped(site: Site, tmp_path: Path) -> None:
    """A shard that is down keeps it from no other shard and from no other round."""
    if site.backend != "sqlite3":
        pytest.skip("here the file of a shard is taken away; servers are killed in long runs")
    file, away = site.folder / "db2" / "books_00002.sqlite3", tmp_path / "away"
    file.rename(away)
    site.run(UNDELIVERED + 'note(1, 2, "waits"), note(1, 5, "is there")')
    wait = f"""
import time
left, until = QuerySet(OutboxRow, using="books_00001").count, time.monotonic() + {PATIENCE}
while left() > %d and time.monotonic() < until:
    time.sleep(0.05)
print(left())
"""
    relay = site.start("manage.py", "mirrors", "relay", "--interval", "0.2")
    try:
        assert site.run(wait % 1) == "1"
        assert relay.stderr is not None
        assert any("books_00002" in line for line in relay.stderr)
        status = site.manage("mirrors", "status", code=1)
        assert "notes.WrittenNote mirrors notes.Note" in status.out
        assert "1 rows in the outboxes, the oldest of " in status.out
        assert "books_00002" in status.err
        away.rename(file)
        assert site.run(wait % 0) == "0"
    finally:
        relay.terminate()
    out, err = relay.communicate(timeout=PATIENCE)
    assert relay.returncode == 0, err
    assert out.count("1 rows delivered") == 2
    assert site.run("print(rows(WrittenNote, 'text'), differences())") == (
        "[('is there',), ('waits',)] []"
    )


def test_rows_of_a_source_that_this_process_does_not_know_stay(site: Site) -> None:
    """Processes with newer code may know it."""
    site.run(
        UNDELIVERED
        + """
note()
row = QuerySet(OutboxRow, using="books_00001").get()
row.pk, row.source = None, "notes.later"
row.save(using="books_00001", force_insert=True)
"""
    )
    done = site.manage("mirrors", "relay", "--once", "--json", code=1)
    assert (done.json["delivered"], done.json["failed"]) == (1, 1)
    assert "'notes.later', which has no mirrors in this process" in done.err
    assert site.run("print(differences(), outbox())") == "[] 1"


@pytest.mark.long
def test_writes_are_accepted_while_the_server_of_the_mirror_is_down(
    own_mariadb: mariadb.MariaDBServer, mariadb_nodes: list[mariadb.Address], tmp_path: Path
) -> None:
    nodes = [mariadb_nodes[0].django(), own_mariadb.address.django()]
    site = Site(tmp_path, nodes, f"i{secrets.token_hex(4)}_", "mysql")
    site.prepare()
    own_mariadb.kill()
    out = site.run("""
note(1, 2, "waits"), note(1, 5, "is there")
print(Note.objects.filter(owner_id=1).count(), [row.text for row in WrittenNote.objects.filter(author_id=5)])
""")
    assert out == "2 ['is there']"
    own_mariadb.start()
    site.manage("mirrors", "relay", "--once")
    assert site.run("print(rows(WrittenNote, 'text'), differences(), outbox())") == (
        "[('is there',), ('waits',)] [] 0"
    )


#: The server of ``books_00002`` dies at the COMMIT there: before it gets it, or before it can answer.
_SERVER_DIES = """
import os, signal, socket
from MySQLdb import OperationalError as Lost
from django.db import OperationalError
from sharded_orm.backends.mysql.connection import VirtualConnection
note({owner}, {author}, "before")
commit = VirtualConnection.commit
def dying(connection):
    if connection.alias != "books_00002":
        return commit(connection)
    if {is_committed}:
        commit(connection)
    os.kill({pid}, signal.SIGKILL)
    try:
        while True:
            socket.create_connection(("127.0.0.1", {port})).close()
    except OSError:
        pass
    if {is_committed}:
        connection.record_loss(Lost(2013, "the connection was lost during COMMIT"))
        raise Lost(2013, "the connection was lost during COMMIT")
    return commit(connection)
VirtualConnection.commit = dying
try:
    note({owner}, {author}, "during")
except OperationalError:
    print("failed")
else:
    print("succeeded")
"""


@pytest.mark.long
@pytest.mark.parametrize("is_committed", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("side", ["source", "mirror"])
def test_a_server_dies_at_a_commit(
    own_mariadb: mariadb.MariaDBServer,
    mariadb_nodes: list[mariadb.Address],
    tmp_path: Path,
    side: str,
    is_committed: bool,
) -> None:
    """What the table "What can be seen after which death" says about a mirror."""
    nodes = [mariadb_nodes[0].django(), own_mariadb.address.django()]
    site = Site(tmp_path, nodes, f"i{secrets.token_hex(4)}_", "mysql")
    site.prepare()
    owner, author = (2, 1) if side == "source" else (1, 2)
    out = site.run(
        _SERVER_DIES.format(
            owner=owner,
            author=author,
            is_committed=is_committed,
            pid=own_mariadb.pid,
            port=own_mariadb.port,
        )
    )
    # Only the source's server can refuse the write.
    assert out == ("failed" if side == "source" else "succeeded")
    own_mariadb.kill()
    own_mariadb.start()
    stored = ["before"] if side == "source" and not is_committed else ["before", "during"]
    assert site.run("print([text for (text,) in rows(Note, 'text')])") == str(stored)
    mirrored = ["before", "during"] if side == "mirror" and is_committed else ["before"]
    assert site.run("print([text for (text,) in rows(WrittenNote, 'text')])") == str(mirrored)
    site.manage("mirrors", "relay", "--once")
    assert site.run("print(differences(), outbox())") == "[] 0"
