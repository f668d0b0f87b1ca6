"""Times writes of rows that have a mirror on another server, and what relays and comparisons do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.benchmarks.report import Line, at_most
from tests.benchmarks.site import Site, new_prefix
from tests.benchmarks.timing import Rounds, summary
from tests.services import mariadb

#: What the issue asks for: a commit with an outbox row, a write of both sides, rows per second.
OUTBOX, BOTH, RELAYED, COMPARED = 1.15, 1.3, 2000, 50_000
CALLS, ROWS = 20, 20_000

_PROGRAM = """
import json, time
from sharded_orm.contrib.mirrors import capture, comparison, relay
from sharded_orm.contrib.mirrors.build import find_mirror
mirror = find_mirror("WrittenNote")
mirror.source.mirrors[:] = [mirror]  # One mirror, as an application of Yupoo's kind has.
deliver = capture.TransactionChanges.deliver_after_commit
numbers = iter(range(10**6, 10**9))

def create(model):
    # Owner 1 is on the first server, author 2 on the second one.
    with sharded_orm.atomic(model, owner_id=1):
        return model.objects.create(note_id=next(numbers), owner_id=1, author_id=2, text="a comment of some length")

def by_hand():
    n = create(PlainNote)
    with sharded_orm.atomic(PlainWrittenNote, author_id=2):
        PlainWrittenNote.objects.create(note_id=n.pk, owner_id=1, author_id=2, text=n.text, price=0, changed_at=n.changed_at)

def undelivered(write):
    capture.TransactionChanges.deliver_after_commit = lambda *ignored: None
    try:
        write()
    finally:
        capture.TransactionChanges.deliver_after_commit = deliver

def seconds(work):
    began = time.perf_counter()
    for _ in range({calls}):
        work()
    return (time.perf_counter() - began) / {calls}

def pairs(ours, other):
    seconds(ours), seconds(other)
    return [(seconds(ours), seconds(other)) for _ in range({rounds})]

result = {{
    "outbox": pairs(lambda: undelivered(lambda: create(Note)), lambda: create(PlainNote)),
    "both": pairs(lambda: create(Note), by_hand),
}}
for alias in aliases("books"):
    for model in (Note, OutboxRow, RowVersion):  # The mirror follows.
        QuerySet(model, using=alias)._raw_delete(alias)
rows = [Note(note_id=next(numbers), owner_id=number % 8 + 1, author_id=number % 8 + 1, text="a comment of some length") for number in range({rows})]
undelivered(lambda: Note.objects.bulk_create(rows))
began = time.perf_counter()
report = relay.relay(min_age=0)
result["relayed"] = report.delivered / (time.perf_counter() - began)
began = time.perf_counter()
for report in comparison.compare(mirror):
    pass
assert not report.differences and not report.pending
result["compared"] = report.compared / (time.perf_counter() - began)
print(json.dumps(result))
"""


def mirrors(site: Site, rounds: Rounds) -> Iterator[Line]:
    """Write rows of one server that have a mirror on another one. Both flush each commit."""
    from tests.integration.mirrors.site import Site as MirrorSite

    durable = {"innodb_flush_log_at_trx_commit": "1", "innodb_doublewrite": "1"}
    with mariadb.servers(2, **durable) as servers, TemporaryDirectory() as folder:
        nodes = [server.address.django() for server in servers]
        mirrored = MirrorSite(Path(folder), nodes, f"{new_prefix()}_", "mysql")
        mirrored.prepare()
        program = _PROGRAM.format(calls=CALLS, rounds=rounds.count, rows=rounds.of(ROWS))
        result = json.loads(mirrored.run(program))
    yield at_most(
        OUTBOX,
        "a transaction that creates a row of a source: with its outbox row",
        "the same without mirrors",
        summary(result["outbox"]),
    )
    yield at_most(
        BOTH,
        "create a row that has a mirror on another server",
        "two transactions by hand, one on each server",
        summary(result["both"]),
    )
    for name, what, goal in (
        ("relayed", "a relay: rows/s", RELAYED),
        ("compared", "mirrors check: rows/s of both sides", COMPARED),
    ):
        speed = result[name]
        yield Line(what, "", f"{speed:,.0f}", f">= {goal:,}", speed >= goal)
