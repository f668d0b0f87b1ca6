"""Processes write and read in every way while shards move back and forth.

Every acknowledged write is there once. Whoever reads sees what was acknowledged before. The processes
learn where a shard is by their statements only (:data:`~.site.POLLED`).
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integration.imports.site import PREAMBLE
from tests.integration.shard_moves.site import Site
from tests.integration.stopped_process import wait_until_stopped
from tests.patience import PATIENCE
from tests.python_process import PythonProcess

_TELLER = """
import os, signal, threading
from django.db.models import F
from sharded_orm import runtime, uncached
from sharded_orm.exceptions import ShardMoved

me, stop, pause = {me}, {stop!r}, {pause!r}
name = next(f"account {{n}}" for n in range(40) if runtime.strategy("accounts").locate(f"account {{n}}") == 0)
alias = "accounts_00000"
account = Account.objects.get(name=name)
book = Book.objects.filter(writer_id=3).order_by("pk").first()
written, added, moved, wrong, reads = [], 0, 0, [], 0

def look():
    global reads
    amounts = list(Order.objects.filter(account=name, amount__gt=10**6).values_list("amount", flat=True))
    total = Order.objects.scatter().filter(amount__gt=10**6).count()
    pages = Book.objects.get(writer_id=3, pk=book.pk).pages
    missing = set(written) - set(amounts)
    if missing or len(amounts) != len(set(amounts)) or total < len(written) or pages < added:
        wrong.append(f"missing {{sorted(missing)}}, {{len(amounts) - len(set(amounts))}} twice, {{total}}, {{pages}} < {{added}}")
    reads += 1

def raw(amount):
    execute(alias, "INSERT INTO library_order (account_id, amount) VALUES (%s, %s)", name, amount)

n = 0
while not os.path.exists(stop):
    if os.path.exists(pause):
        os.remove(pause)
        # Between two transactions: in one it would keep its locks.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    n += 1
    amount = me * 10**6 + n
    kind = n % 6
    try:
        if kind == 0:
            Order.objects.create(account=account, amount=amount)
        elif kind == 1:
            Order.objects.bulk_create([Order(account=account, amount=amount), Order(account=account, amount=amount + 500_000)])
            written.append(amount + 500_000)
        elif kind == 2:
            raw(amount)
        elif kind == 3:
            with transaction.atomic(using="accounts"):
                Order.objects.create(account=account, amount=amount)
                Order.objects.create(account=account, amount=-amount).delete()
        elif kind == 4:
            added += Book.objects.filter(writer_id=3, pk=book.pk).update(pages=F("pages") + 1)
            continue
        else:
            Order.objects.create(account=account, amount=-amount).delete()
            look()
            continue
        written.append(amount)
    except ShardMoved:
        if kind != 3:
            raise
        moved += 1
print(json.dumps([written, added, moved, wrong, reads]))
"""


def _tellers(site: Site, folder: Path, count: int) -> list[PythonProcess]:
    site.run("Book.objects.filter(writer_id=3).update(pages=0)")
    return [
        site.start(
            "run",
            PREAMBLE
            + _TELLER.format(me=me, stop=str(folder / "stop"), pause=str(folder / f"pause {me}")),
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


def _check(site: Site, results: list[Any]) -> None:
    assert [result[3] for result in results] == [[]] * len(results)
    assert all(result[4] > 5 for result in results), "the tellers did not get to read"
    written = sorted(amount for result in results for amount in result[0])
    found = site.run(
        "print(sorted(Order.objects.scatter().filter(amount__gt=10**6).values_list('amount', flat=True)))"
    )
    assert json.loads(found) == written
    assert int(site.run("print(Order.objects.scatter().filter(amount__lt=0).count())")) == 0
    pages = site.run(
        "print(sum(Book.objects.filter(writer_id=3, pages__gt=0).values_list('pages', flat=True)))"
    )
    assert int(pages) == sum(result[1] for result in results)


def test_no_write_is_lost_and_nothing_old_is_read(site: Site, tmp_path: Path) -> None:
    tellers = _tellers(site, tmp_path, 3)
    try:
        for group, shard, node in (
            ("accounts", "0", "db2"),
            ("books", "3", "db1"),
            ("accounts", "0", "db1"),
            ("books", "3", "db2"),
        ):
            report = site.move(group, shard, "--to", node, "--json").json
            assert report["moved"] == {shard: node}, report
    finally:
        results = _results(tellers, tmp_path)
    _check(site, results)


def test_a_process_that_was_paused_over_the_move_goes_on_at_the_new_place(
    site: Site, tmp_path: Path
) -> None:
    tellers = _tellers(site, tmp_path, 2)
    try:
        (tmp_path / "pause 1").touch()
        wait_until_stopped(tellers[0])
        site.move("accounts", "0", "--to", "db2")
        site.move("accounts", "--cleanup")
    finally:
        os.kill(tellers[0].pid, signal.SIGCONT)
        results = _results(tellers, tmp_path)
    assert [result[3] for result in results] == [[], []]


def test_a_transaction_fails_as_a_whole_and_may_be_run_again(site: Site) -> None:
    said = site.run("""
import subprocess, sys
from sharded_orm import operations
from sharded_orm.exceptions import ShardMoved
from sharded_orm.operations import shard_moves
from sharded_orm.operations.shard_moves.shard_mover import ShardMover
from sharded_orm import runtime
import threading
name = next(f"account {n}" for n in range(40) if runtime.strategy("accounts").locate(f"account {n}") == 0)
account = Account.objects.get(name=name)
before = Order.objects.scatter().count()
attempts = []
def work():
    attempts.append(runtime.shard("accounts", 0).node)
    with transaction.atomic(using="accounts"):
        Order.objects.create(account=account, amount=1)
        if len(attempts) == 1:
            hidden.set()
        Order.objects.create(account=account, amount=2)
# The tables are hidden while a transaction has begun, but has sent nothing to the shard.
hide = ShardMover._copy_the_rest
is_hidden, may_publish, hidden = threading.Event(), threading.Event(), threading.Event()
def hiding(self):
    is_hidden.set()
    assert may_publish.wait(60)
    hide(self)
ShardMover._copy_the_rest = hiding
def move():
    try:
        reports.append(shard_moves.move_shards("accounts", [0], "db2"))
    finally:
        connections.close_all()
reports = []
mover = threading.Thread(target=move)
mover.start()
assert is_hidden.wait(60)
try:
    work()
except ShardMoved as error:
    print(type(error).__name__, "Run the transaction again" in str(error))
may_publish.set()
mover.join()
work()
print(reports[0].moved, Order.objects.scatter().count() - before, attempts)
""")
    assert said.splitlines() == [
        "ShardMoved True",
        "{0: 'db2'} 2 ['db1', 'db2']",
    ]


def test_statements_wait_while_the_tables_are_hidden_and_say_why_if_it_takes_too_long(
    site: Site,
) -> None:
    site.content["sharded_orm"]["MOVE_WAIT"] = 0.2
    site.save()
    done = site.python(
        "manage.py", "shards", "move", "accounts", "0", "--to", "db2",
        KILL_AT="sharded_orm.operations.shard_moves.shard_mover.ShardMover._copy_the_rest:1",
    )  # fmt: skip
    assert done.code == -signal.SIGKILL
    said = site.run("""
from sharded_orm.exceptions import ShardMoved
for statement in (
    lambda: list(Order.objects.using("accounts_00000").all()),
    lambda: Order.objects.scatter().count(),
    lambda: Order.objects.using("accounts_00000").update(amount=1),
    lambda: execute("accounts_00000", "SELECT * FROM library_order"),
):
    try:
        statement()
    except Exception as error:
        print(type(error).__name__, "shards move" in str(error) and "--repair" in str(error))
""")
    assert said.splitlines() == [
        "ShardMoved True",
        "ScatterError True",
        "ShardMoved True",
        "ShardMoved True",
    ]
    site.move("accounts", "--repair")
    assert int(site.run("print(Order.objects.scatter().count())")) == 40


@pytest.mark.parametrize("query", ["no_such_table", "no_such_schema.library_order"])
def test_a_table_that_is_missing_for_another_reason_is_missing(site: Site, query: str) -> None:
    said = site.run(f"""
from django.db import DatabaseError
from sharded_orm.exceptions import ShardMoved
try:
    execute("accounts_00000", "SELECT * FROM {query}")
except DatabaseError as error:
    print(isinstance(error, ShardMoved))
""")
    assert said == "False"
