"""Processes write and read a key in every way, while it moves back and forth.

Every acknowledged write is there once, on the shard of the key. Whoever reads sees what was
acknowledged before.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.moves.site import WRITER, Site
from tests.patience import PATIENCE
from tests.python_process import PythonProcess

_TELLER = """
import os
from django.db import OperationalError
from django.db.models import F
from sharded_orm import runtime, uncached
from sharded_orm.exceptions import KeyMoved
atomic = transaction.atomic

me, key, stop = {me}, {key}, {stop!r}
book = Book.objects.filter(writer_id=key).order_by("pk").first().pk
written, added, moved, wrong, reads = [], 0, 0, [], 0

def insert(*pks):
    Topic.objects.bulk_create([Topic(id=pk, writer_id=key, name="bulk") for pk in pks])

def insert_raw(pk):
    alias = runtime.shard("books", runtime.strategy("books").locate(key)).alias
    execute(alias, "INSERT INTO library_topic (id, writer_id, name) VALUES (%s, %s, 'raw')", pk, key)

def look():
    global reads
    pks = list(Topic.objects.filter(writer_id=key, id__gt=10**6).values_list("pk", flat=True))
    missing = set(written) - set(pks)
    with uncached():
        pages = Book.objects.filter(writer_id=key).values_list("pages", flat=True).get(pk=book)
    if missing or len(pks) != len(set(pks)) or pages < added:
        wrong.append(f"missing {{sorted(missing)}}, {{len(pks) - len(set(pks))}} twice, {{pages}} < {{added}}")
    reads += 1

n = 0
while not os.path.exists(stop):
    n += 1
    pk = me * 10**6 + n
    try:
        if n % 7 == 0:
            Topic.objects.create(id=pk, writer_id=key, name="orm")
            written.append(pk)
        elif n % 7 == 1:
            insert(pk, pk + 500_000)
            written += [pk, pk + 500_000]
        elif n % 7 == 2:
            insert_raw(pk)
            written.append(pk)
        elif n % 7 == 3:
            with atomic(using="books"):
                own = Book.objects.select_for_update().get(writer_id=key, pk=book)
                own.pages = (own.pages or 0) + 1
                own.save(update_fields=["pages"])
                Topic.objects.create(id=pk, writer_id=key, name="in a transaction")
            written.append(pk)
            added += 1
        elif n % 7 == 4:
            added += Book.objects.filter(writer_id=key, pk=book).update(pages=F("pages") + 1)
        elif n % 7 == 5:
            Topic(id=pk, writer_id=key, name="saved").save()
            written.append(pk)
        look()
    except KeyMoved:
        moved += 1
    except OperationalError as error:
        # Several writers of the same row may end in a deadlock on one database as well.
        if n % 7 not in (3, 4) or error.args[0] != 1213:
            raise
print(json.dumps([written, added, moved, wrong, reads]))
"""


def _tellers(site: Site, folder: Path, count: int) -> list[PythonProcess]:
    site.run(f"Book.objects.filter(writer_id={WRITER}).update(pages=0)")
    from tests.integration.imports.site import PREAMBLE

    return [
        site.start(
            "run",
            PREAMBLE + _TELLER.format(me=me, key=WRITER, stop=str(folder / "stop")),
        )
        for me in range(1, count + 1)
    ]


def _results(tellers: list[PythonProcess], folder: Path) -> list[Any]:
    (folder / "stop").touch()
    results = []
    for teller in tellers:
        out, err = teller.communicate(timeout=PATIENCE)
        assert teller.returncode == 0, err
        results.append(json.loads(out))
    return results


@pytest.mark.parametrize("count", [4])
def test_no_write_is_lost_and_nothing_old_is_read(site: Site, tmp_path: Path, count: int) -> None:
    tellers = _tellers(site, tmp_path, count)
    try:
        for target in ("0", "3", "1", "3"):
            report = site.move(str(WRITER), "--to", target, "--json").json
            assert report["ok"], report
    finally:
        results = _results(tellers, tmp_path)
    assert [result[3] for result in results] == [[]] * count
    assert all(result[4] > 10 for result in results), "the tellers did not get to read"
    written = sorted(pk for result in results for pk in result[0])
    found = site.run(
        f"print(sorted(Topic.objects.filter(writer_id={WRITER}, id__gt=10**6).values_list('pk', flat=True)))"
    )
    assert json.loads(found) == written
    pages = site.run(
        f"print(sum(Book.objects.filter(writer_id={WRITER}, pages__gt=0).values_list('pages', flat=True)))"
    )
    assert int(pages) == sum(result[1] for result in results)
    assert {shard for shard, rows in site.counts().items() if rows} == {site.place()}
