"""Very many messages, delivered late, twice and in another order, by two relays of which one loses its lease."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.mirrors.site import PREAMBLE, Site
from tests.patience import PATIENCE

#: Deliveries arrive later than their sender believes, after later ones, and some of them twice.
_DISTORTED = """
import os, random
from django.db import OperationalError
from sharded_orm.contrib.mirrors import capture, delivery, relay
from sharded_orm.contrib.mirrors.build import find_mirror
mirror = find_mirror("WrittenNote")
mirror.source.mirrors[:] = [mirror]
chance = random.Random({seed})
delayed, now = [], delivery.write_rows
def arrive(number):
    now(*delayed[number])
    del delayed[number]
def distorted(*call):
    what = chance.random()
    if what < 0.7:
        now(*call)
    if what > 0.4:
        delayed.append(call)
    while len(delayed) > 30:
        arrive(chance.randrange(len(delayed)))
delivery.write_rows = distorted
def let_all_arrive():
    while delayed:
        try:
            arrive(chance.randrange(len(delayed)))
        except OperationalError:
            pass  # Locks of others.
"""
_WRITER = """
owner, other, deliver = {owner}, {owner} + 2, capture.TransactionChanges.deliver_after_commit
by_owner = {{owner: set(), other: set()}}
free = {{owner * 10**6 + number for number in range({rows})}}
messages = 0
def create(key, pks):
    global messages
    Note.objects.bulk_create([Note(note_id=pk, owner_id=key, author_id=chance.randint(1, 8), text="new") for pk in pks])
    by_owner[key] |= pks
    messages += len(pks)
create(owner, free)
free = set()
while messages < {count}:
    # Half of the rows are left to the relays.
    capture.TransactionChanges.deliver_after_commit = chance.choice([deliver, lambda *ignored: None])
    key = chance.choice([owner, other])
    some = set(chance.sample(sorted(by_owner[key]), min(len(by_owner[key]), {rows} // 5)))
    what = chance.random()
    try:
        if what < 0.1:
            Note.objects.filter(owner_id=key, pk__in=some).delete()
            by_owner[key] -= some
            free |= some
            messages += len(some)
        elif what < 0.2:
            create(key, free)  # Perhaps under another shard key than before.
            free = set()
        else:
            messages += Note.objects.filter(owner_id=key, pk__in=some).update(text=str(messages), author_id=chance.randint(1, 8))
    except OperationalError:
        pass  # Locks of others.
let_all_arrive()
print(messages)
"""
_RELAY = """
from sharded_orm.operations.runs import lease
lease.INTERVAL = 0.05
delivered = lost = 0
while not os.path.exists({stop!r}):
    report = relay.relay(min_age=0)
    delivered += report.delivered
    lost += sum("taken over" in problem for problem in report.problems)
    if lost:
        open({lost!r}, "w").close()
let_all_arrive()
print(delivered, lost)
"""
_STEAL_LEASES = """
import os, time
from sharded_orm.contrib.mirrors import relay
from sharded_orm.models import OperationRun
# A relay whose row is gone has lost its lease. Another one begins, while the first ends its batch.
for _ in range(3000):
    if os.path.exists({lost!r}):
        break
    OperationRun.objects.using("default").filter(kind=relay.KIND).delete()
    time.sleep(0.02)
"""
_STATE = """
names = [f.attname for f in WrittenNote._meta.concrete_fields]
there, wanted = (
    sorted(model.objects.uncached().scatter().values_list(*names)) for model in (WrittenNote, Note)
)
print(len(there) > 0, there == wanted, outbox())
"""


@pytest.mark.parametrize(
    ("count", "rows"),
    [
        pytest.param(200, 20, id="some"),
        pytest.param(50_000, 1_000, id="many", marks=pytest.mark.long),
    ],
)
def test_nothing_is_lost_and_nothing_old_on_top(
    site: Site, tmp_path: Path, count: int, rows: int
) -> None:
    stop, lost = str(tmp_path / "stop"), str(tmp_path / "lost")
    relays = [
        site.start(
            "run",
            PREAMBLE + _DISTORTED.format(seed=seed) + _RELAY.format(stop=stop, lost=lost),
        )
        for seed in (1, 2)
    ]
    writers = [
        site.start(
            "run",
            PREAMBLE
            + _DISTORTED.format(seed=owner)
            + _WRITER.format(owner=owner, count=count, rows=rows),
        )
        for owner in (1, 2)
    ]
    thief = site.start("run", PREAMBLE + _STEAL_LEASES.format(lost=lost))
    results = []
    for process in (*writers, thief, *relays):
        if process is relays[0]:
            Path(stop).touch()
        out, err = process.communicate(timeout=10 * PATIENCE)
        assert process.returncode == 0, err
        results.append(out)
    assert sum(int(out) for out in results[:2]) >= 2 * count
    totals = [tuple(map(int, out.split())) for out in results[3:]]
    assert sum(delivered for delivered, _ in totals) > 0
    assert Path(lost).exists(), totals
    site.manage("mirrors", "relay", "--once")
    assert site.run(_STATE) == "True True 0"
