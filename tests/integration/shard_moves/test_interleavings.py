"""Statements and operations that come at the worst moment of a shard's move."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.imports.site import BACKENDS, PREAMBLE
from tests.integration.shard_moves.site import Site
from tests.patience import PATIENCE

_RUN = (
    PREAMBLE
    + """
import threading
from sharded_orm import runtime
from sharded_orm.backends.group import moved_shards
from sharded_orm.exceptions import ShardMoved
from sharded_orm.operations import shard_moves
from sharded_orm.operations.shard_moves.shard_mover import ShardMover
name = next(f"account {n}" for n in range(40) if runtime.strategy("accounts").locate(f"account {n}") == 0)
account = Account.objects.get(name=name)
before = Order.objects.scatter().count()
is_reached, may_go_on, is_moved = threading.Event(), threading.Event(), threading.Event()

def stop_before(name):
    # The move waits before it calls the method for the first time.
    method = getattr(ShardMover, name)
    def waiting(self, *arguments):
        is_reached.set()
        assert may_go_on.wait(60)
        return method(self, *arguments)
    setattr(ShardMover, name, waiting)

def move():
    try:
        reports.append(shard_moves.move_shards("accounts", [0], "db2"))
    finally:
        is_moved.set()
        connections.close_all()

reports = []
mover = threading.Thread(target=move)

def look_after_the_move(*arguments):
    # Whoever looks whether tables are hidden comes too late: meanwhile they have got their names.
    may_go_on.set()
    assert is_moved.wait(60)
    return has_hidden_tables(*arguments)
has_hidden_tables = moved_shards.has_hidden_tables
moved_shards.has_hidden_tables = look_after_the_move
"""
)
STATEMENTS = {
    "a query": "Order.objects.using('accounts_00000').filter(amount=1).count()",
    "a scattered query": "Order.objects.scatter().filter(amount=1).count()",
    "a save": "Order.objects.create(account=account, amount=1) and 1",
    "an update": "Order.objects.filter(account=account).update(amount=1) and 1",
    "raw SQL": "len(execute('accounts_00000', 'SELECT 1 FROM library_account WHERE name = %s', name))",
    "a query in a transaction": "len(in_transaction(lambda: list(Account.objects.filter(name=name))))",
}


@pytest.mark.parametrize("statement", STATEMENTS.values(), ids=STATEMENTS)
def test_tables_that_are_shown_between_the_statement_and_the_look(
    site: Site, statement: str
) -> None:
    """The topology is published, so the statement goes to the new node, whose tables are hidden still."""
    if site.backend == "sqlite3" and "transaction" in statement:
        return  # The transaction has the file for itself, so nobody shows the tables meanwhile.
    done = site.python(
        "run",
        _RUN
        + f"""
def in_transaction(query):
    try:
        with transaction.atomic(using="accounts"):
            return query()
    except ShardMoved:
        # A statement that fails ends the transaction on PostgreSQL. So it is run again.
        assert connections["accounts_00000"].vendor == "postgresql"
        with transaction.atomic(using="accounts"):
            return query()
stop_before("_show")
mover.start()
assert is_reached.wait(60)
runtime.refresh()  # as other processes do
assert runtime.shard("accounts", 0).node == "db2"
print({statement} in (0, 1))
mover.join()
print(reports[0].moved)
""",
    )
    assert done.code == 0, done.err
    assert done.out.splitlines() == ["True", "{0: 'db2'}"]


def test_the_first_statement_of_a_process_follows_the_shard(site: Site, tmp_path: Path) -> None:
    """The process has read the topology, but has sent nothing, when its shard's old schema is dropped."""
    processes = []
    with ExitStack() as files:
        for number, statement in enumerate(STATEMENTS.values()):
            fifo = tmp_path / str(number)
            os.mkfifo(fifo)
            program = f"""
from sharded_orm import runtime
def in_transaction(query):
    with transaction.atomic(using="accounts"):
        return query()
name = next(f"account {{n}}" for n in range(40) if runtime.strategy("accounts").locate(f"account {{n}}") == 0)
account = Account(name=name)
open({str(fifo)!r}).read()
try:
    print({statement} >= 0)
except Exception as error:
    print(type(error).__name__, "Run the transaction again" in str(error))
"""
            processes.append(site.start("run", PREAMBLE + program))
            # Waits until the process reads.
            files.enter_context(fifo.open("w"))
        site.move("accounts", "0", "--to", "db2")
        site.move("accounts", "--cleanup")
    said = {}
    for name, process in zip(STATEMENTS, processes, strict=True):
        out, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, err
        said[name] = out.strip()
    assert said == dict.fromkeys(STATEMENTS, "True") | {
        "a query in a transaction": "ShardMoved True"
    }


def test_executemany_says_that_a_part_may_be_done(site: Site) -> None:
    done = site.python(
        "run",
        _RUN
        + """
stop_before("_copy_the_rest")
mover.start()
assert is_reached.wait(60)
moved_shards.has_hidden_tables = has_hidden_tables
try:
    with connections["accounts_00000"].cursor() as cursor:
        cursor.executemany("INSERT INTO library_order (account_id, amount) VALUES (%s, %s)", [(name, 1), (name, 2)])
except ShardMoved as error:
    print("A part may have been done already" in str(error))
may_go_on.set()
mover.join()
""",
    )
    assert done.code == 0, done.err
    assert done.out.strip() == "True"


_PROCEDURE = """
import os
from contextlib import nullcontext
alias = "accounts_00000"
if connections[alias].vendor == "postgresql":
    name = f"public.calls_{os.getpid()}"
    execute(alias, f"CREATE SEQUENCE {name}")
    statement = f"do $$ BEGIN PERFORM nextval('{name}'); PERFORM 1 FROM library_order; END $$"
    calls, drop = f"SELECT last_value FROM {name}", f"DROP SEQUENCE {name}"
else:
    shard = connections[alias].settings_dict["NAME"]
    other = f"{shard}_calls"
    execute(alias, f"CREATE DATABASE {other}")
    execute(alias, f"CREATE TABLE {other}.calls (id INT)")
    execute(alias, f"CREATE PROCEDURE {other}.work() BEGIN INSERT INTO {other}.calls VALUES (1); COMMIT;"
        f" INSERT INTO {shard}.library_order () VALUES (); END")
    statement = f" CALL {other}.work()"
    calls, drop = f"SELECT COUNT(*) FROM {other}.calls", f"DROP DATABASE {other}"
"""


@pytest.mark.parametrize("site", BACKENDS[1:], indirect=True)
@pytest.mark.parametrize("block", ["nullcontext()", "transaction.atomic(using=alias)"])
def test_a_procedure_is_not_repeated(site: Site, block: str) -> None:
    """It may have committed a part of its work before it found no table. SQLite has no procedures."""
    done = site.python(
        "run",
        _RUN
        + _PROCEDURE
        + f"""
stop_before("_copy_the_rest")
mover.start()
assert is_reached.wait(60)
moved_shards.has_hidden_tables = has_hidden_tables
try:
    with {block}:
        execute(alias, statement)
except ShardMoved as error:
    print("A part may have been done already" in str(error), end=" ")
print(*execute(alias, calls)[0], end=" ")
execute(alias, drop)
may_go_on.set()
mover.join()
print(reports[0].moved)
""",
    )
    assert done.code == 0, done.err
    assert done.out.strip() == "True 1 {0: 'db2'}"


def test_migrate_creates_no_tables_beside_hidden_ones(site: Site) -> None:
    done = site.python(
        "run",
        _RUN
        + """
from django.core.management import call_command
stop_before("_copy_the_rest")
mover.start()
assert is_reached.wait(60)
moved_shards.has_hidden_tables = has_hidden_tables
try:
    call_command("migrate", database="accounts_00000", verbosity=0)
except ShardMoved as error:
    print("--repair" in str(error))
may_go_on.set()
mover.join()
print(reports[0].moved, Order.objects.scatter().count() == before)
""",
    )
    assert done.code == 0, done.err
    assert done.out.splitlines() == ["True", "{0: 'db2'} True"]


def test_a_move_that_could_not_be_ended_is_kept_for_repair(site: Site) -> None:
    """The next shard's move must not take its place in the journal."""
    before = site.rows("Account", "Order")
    done = site.python(
        "run",
        PREAMBLE
        + """
from django.db import OperationalError
from sharded_orm.operations import shard_moves
from sharded_orm.operations.shard_moves.shard_mover import ShardMover
def failing(self):
    raise OperationalError(2006, "Server has gone away")
ShardMover._copy_the_rest = failing
ShardMover.undo = failing
print(json.dumps(shard_moves.move_shards("accounts", [0, 1], "db2").to_json()))
""",
    )
    assert done.code == 0, done.err
    assert list(done.json["failures"]) == ["0"]
    assert "--repair" in done.json["failures"]["0"]
    assert [site.place(number) for number in (0, 1)] == ["db1", "db1"]
    site.move("accounts", "--repair")
    assert site.rows("Account", "Order") == before
    assert site.left() == ""
    assert site.move("accounts", "0-1", "--to", "db2", "--json").json["moved"] == {
        "0": "db2",
        "1": "db2",
    }


def test_a_move_that_fails_after_its_publication_is_reported_with_its_pause(site: Site) -> None:
    done = site.python(
        "run",
        PREAMBLE
        + """
from django.db import OperationalError
from sharded_orm.operations import shard_moves
from sharded_orm.operations.shard_moves.record import ShardMoveRecord
publish = ShardMoveRecord.publish
def failing(self):
    publish(self)
    raise OperationalError(2006, "Server has gone away")
ShardMoveRecord.publish = failing
report = shard_moves.move_shards("accounts", [0], "db2")
print(report.moved, report.ok, [0 < pause < 30 for pause in report.pauses])
""",
    )
    assert done.code == 0, done.err
    assert done.out.strip() == "{0: 'db2'} True [True]"


def test_tables_in_the_way_are_named(site: Site) -> None:
    done = site.python(
        "run",
        PREAMBLE
        + """
from sharded_orm import runtime
from sharded_orm.operations import shard_moves
from sharded_orm.operations.shard_moves.shard_mover import ShardMover
def in_the_way(self):
    with self._source.wrapper.cursor() as cursor:
        cursor.execute("CREATE TABLE library_order (id INT PRIMARY KEY)")
    raise ValueError
ShardMover._copy_the_rest = in_the_way
print(json.dumps(shard_moves.move_shards("accounts", [0], "db2").to_json()))
""",
    )
    assert done.code == 0, done.err
    assert "(library_order). Drop or rename these" in done.json["failures"]["0"]
    site.run("execute('accounts_00000', 'DROP TABLE library_order')")
    site.move("accounts", "--repair")
    assert int(site.run("print(Order.objects.scatter().count())")) == 40


def test_a_node_that_is_gone_does_not_stop_repair(site: Site) -> None:
    """The copy on it is removed when the node is back."""
    before = site.rows("Account", "Order")
    done = site.python(
        "manage.py", "shards", "move", "accounts", "0", "--to", "db2",
        KILL_AT="sharded_orm.operations.shard_moves.shard_mover.ShardMover._copy_the_rest:1",
    )  # fmt: skip
    assert done.code < 0
    report = site.python(
        "run",
        PREAMBLE
        + """
from django.db import OperationalError
from sharded_orm.operations import shard_moves
from sharded_orm.operations.shard_moves import shard_mover
def gone(node):
    raise OperationalError(2002, "Can't connect to server")
shard_mover.node_connection = gone
print(json.dumps(shard_moves.repair("accounts").to_json()))
""",
    )
    assert report.code == 0, report.err
    assert "the copy of shard 0 on 'db2' was not deleted" in report.json["notes"][0]
    assert site.rows("Account", "Order") == before
    assert "old tables of shard 0 on 'db2' were deleted" in site.move("accounts", "--repair").out
    assert site.left() == ""
