"""A thousand moves of keys with up to 2,000 rows, while processes write and read all of the keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.imports.site import PREAMBLE
from tests.integration.moves.site import Site
from tests.patience import PATIENCE

KEYS, ROUNDS, PROCESSES = range(101, 201), 10, 4
_FILL = """
from sharded_orm import runtime
runtime.strategy("books").store.place("books", {str(key): key % 4 for key in range(101, 201)})
for key in range(101, 201):
    Topic.objects.bulk_create(
        Topic(id=key * 10_000 + n, writer_id=key, name=f"topic {n}") for n in range((key - 100) * 20)
    )
"""
#: No error may reach it: it opens no transaction of its own that a switch could break.
_WORKER = """
import os
import random

me, stop = {me}, {stop!r}
dice = random.Random(me)
written, calls, wrong = {{key: [] for key in range(101, 201)}}, 0, []
while not os.path.exists(stop):
    key = dice.randrange(101, 201)
    calls += 1
    pk = me * 10**7 + calls
    kind = calls % 4
    if kind == 0:
        Topic.objects.create(id=pk, writer_id=key, name="new")
    elif kind == 1:
        Topic.objects.bulk_create([Topic(id=pk, writer_id=key, name="new")])
    else:
        first = Topic.objects.filter(writer_id=key, id=key * 10_000)
        if first.update(name=f"changed by {{me}}") != 1:
            wrong.append(f"the first row of {{key}} is missing")
    if kind < 2:
        written[key].append(pk)
    topics = Topic.objects.filter(writer_id=key)
    own = topics.filter(id__gt=me * 10**7, id__lt=(me + 1) * 10**7)
    if sorted(own.values_list("pk", flat=True)) != written[key]:
        wrong.append(f"rows of {{key}} are not those that were written")
    if topics.filter(id__lt=10**7).count() != (key - 100) * 20:
        wrong.append(f"old rows of {{key}} are missing, or there twice")
print(json.dumps([calls, written, wrong]))
"""


@pytest.mark.long
def test_a_thousand_moves_while_the_site_works(site: Site, tmp_path: Path) -> None:
    site.run(_FILL)
    stop = tmp_path / "stop"
    workers = [
        site.start("run", PREAMBLE + _WORKER.format(me=me, stop=str(stop)))
        for me in range(1, PROCESSES + 1)
    ]
    moved, pauses = 0, []
    try:
        for number in range(ROUNDS):
            for target in range(4):
                keys = [str(key) for key in KEYS if (key - number) % 4 == (target - 1) % 4]
                report = site.move(*keys, "--to", str(target), "--keep", "0", "--json").json
                assert report["ok"] and not report["already"], report
                moved += len(report["moved"])
                pauses.append(report["longest_pause_ms"])
    finally:
        stop.touch()
        results = []
        for worker in workers:
            out, err = worker.communicate(timeout=PATIENCE)
            assert worker.returncode == 0, err
            results.append(json.loads(out))
    assert moved == 1000
    assert [wrong for _, _, wrong in results] == [[]] * PROCESSES
    print(f"{moved} moves, {sum(calls for calls, _, _ in results)} rounds of calls,"
          f" longest pauses of the commands in ms: {sorted(pauses)}")  # fmt: skip
    written = sorted(pk for _, of_key, _ in results for pks in of_key.values() for pk in pks)
    found = site.run(
        "print(sorted(Topic.objects.scatter().filter(id__gt=10**7).values_list('pk', flat=True)))"
    )
    assert json.loads(found) == written
    site.manage("keys", "verify", "books", *map(str, KEYS))
