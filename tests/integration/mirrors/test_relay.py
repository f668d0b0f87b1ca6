"""What writers leave in the outboxes, relays deliver: late, twice, in any order, and after kills."""

from __future__ import annotations

import signal

import pytest

from tests.integration.mirrors.site import PREAMBLE, Site

#: The process dies at the end of that call, in the second or third write of the program.
WRITER_DIES = [
    "sharded_orm.contrib.mirrors.capture.record:3",
    "sharded_orm.contrib.mirrors.delivery._deliver_to:5",
    "sharded_orm.contrib.mirrors.rows._insert_versions:5",
    "sharded_orm.contrib.mirrors.rows._insert:5",
    "sharded_orm.contrib.mirrors.delivery.read_source:5",
    "sharded_orm.contrib.mirrors.delivery.deliver:3",
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
    "sharded_orm.contrib.mirrors.rows._lock_versions:1",
    "sharded_orm.contrib.mirrors.rows._write_locked:1",
    "sharded_orm.contrib.mirrors.delivery.write_rows:1",
    "sharded_orm.contrib.mirrors.relay.deliver:1",
    "sharded_orm.contrib.mirrors.relay.remove:1",
]
#: Nobody delivers after the commit, as if each writer died there.
UNDELIVERED = """
from sharded_orm.contrib.mirrors import capture
capture.deliver_after_commit = lambda *ignored: None
"""


@pytest.mark.parametrize("moment", WRITER_DIES)
def test_a_relay_delivers_what_a_killed_writer_has_committed(site: Site, moment: str) -> None:
    done = site.python("run", PREAMBLE + _PROGRAM, KILL_AT=moment)
    assert done.code == -signal.SIGKILL, f"{moment} did not come: {done.out} {done.err}"
    site.manage("mirrors", "relay", "--once")
    # "second" was committed in any case.
    assert site.run("print(rows(WrittenNote, 'text')[0], differences(), outbox())") == (
        "('second',) [] 0"
    )


@pytest.mark.parametrize("moment", RELAY_DIES)
def test_a_relay_goes_on_after_a_killed_one(site: Site, moment: str) -> None:
    site.run(UNDELIVERED + _PROGRAM)
    done = site.python("manage.py", "mirrors", "relay", "--once", KILL_AT=moment)
    assert done.code == -signal.SIGKILL, f"{moment} did not come: {done.out} {done.err}"
    site.manage("mirrors", "relay", "--once")
    assert site.run("print(rows(WrittenNote, 'author_id', 'text'), differences(), outbox())") == (
        "[(3, 'second'), (5, 'third')] [] 0"
    )
