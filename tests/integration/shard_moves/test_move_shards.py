"""Moving shards to another node: what moves, what stays, and what is refused."""

from __future__ import annotations

import json

import pytest

from tests.integration.imports.site import PREAMBLE
from tests.integration.shard_moves.site import Site

ACCOUNTS = ("Account", "Order")
BOOKS = ("Book", "Novel", "Topic", "Review", "Counted")


def _ids(site: Site) -> list[int]:
    """The next ids that the shards of ``accounts`` give."""
    created: list[int] = json.loads(
        site.run("""
from sharded_orm import runtime
ids = []
for number in range(4):
    name = next(f"account {n}" for n in range(40) if runtime.strategy("accounts").locate(f"account {n}") == number)
    order = Order.objects.create(account=Account.objects.get(name=name), amount=3)
    ids.append(order.pk)
    order.delete()
print(json.dumps(ids))
""")
    )
    return created


def test_shards_move_with_everything_and_back(site: Site) -> None:
    before, ids = site.rows(*ACCOUNTS), _ids(site)
    report = site.move("accounts", "0-1", "--to", "db2", "--json").json
    assert report["moved"] == {"0": "db2", "1": "db2"}
    assert [site.place(number) for number in range(4)] == ["db2"] * 4
    assert site.rows(*ACCOUNTS) == before
    # Ids of deleted rows are not given again.
    assert _ids(site) == [n + 1 for n in ids]
    assert site.left().count("sharded_orm_capture_hidden") > 4
    assert site.move("accounts", "0", "--to", "db1", "--json").json["moved"] == {"0": "db1"}
    assert site.rows(*ACCOUNTS) == before
    assert _ids(site) == [n + 2 for n in ids]
    assert "old tables of shard 1" in site.move("accounts", "--cleanup").out
    assert site.left() == ""
    site.manage("shards", "check")
    site.manage("migrate_shards", "--check")


def test_values_of_every_kind_are_the_same(site: Site) -> None:
    before = site.rows(*BOOKS)
    topics = "print(sorted((b.pk, t.pk) for b in Book.objects.scatter() for t in b.topics.all()))"
    related = site.run(topics)
    site.move("books", "0-3", "--to", "db2")
    site.move("books", "0-3", "--to", "db1")
    assert site.rows(*BOOKS) == before
    assert site.run(topics) == related
    # The constraints are there.
    said = site.run("""
from django.db import IntegrityError
book = Book.objects.filter(writer_id=3).first()
for broken in (
    lambda: execute("books_00003", "INSERT INTO library_review (writer_id, number, book_id) VALUES (3, 77, 987654)"),
    lambda: execute("books_00003", "INSERT INTO library_review SELECT * FROM library_review"),
):
    try:
        broken()
    except IntegrityError:
        print("refused")
""")
    assert said.splitlines() == ["refused", "refused"]


def test_ranges_are_divided_and_joined(site: Site) -> None:
    def ranges() -> list[tuple[list[int], str]]:
        document = site.manage("topology", "pull").json
        return [(r["range"], r["primary"]) for r in document["groups"]["accounts"]["RANGES"]]

    assert ranges() == [([0, 1], "db1"), ([2, 3], "db2")]
    site.move("accounts", "0", "--to", "db2")
    assert ranges() == [([0, 0], "db2"), ([1, 1], "db1"), ([2, 3], "db2")]
    assert site.move("accounts", "0-3", "--to", "db2", "--json").json["already"] == [0, 2, 3]
    assert ranges() == [([0, 3], "db2")]


_TEXT_KEYS = """
names = [chr(97 + n % 26).upper() * (n % 3) + f"{n:x}" + "\\u00df" * (n % 2) for n in range(4500)]
with connections["accounts_00000"].cursor() as cursor:
    cursor.executemany("INSERT INTO library_account (name) VALUES (%s)", [(name,) for name in names])
    # Zero is an id like any other.
    cursor.execute("UPDATE library_order SET id = 0 ORDER BY id LIMIT 1" if connections["accounts_00000"].vendor == "mysql"
        else "UPDATE library_order SET id = 0 WHERE id = (SELECT MIN(id) FROM library_order)")
"""


def test_keys_of_text_and_the_id_zero_move_in_several_batches(site: Site) -> None:
    site.run(_TEXT_KEYS)
    before = site.rows(*ACCOUNTS)
    assert site.move("accounts", "0", "--to", "db2", "--json").json["rows"] > 4500
    assert site.rows(*ACCOUNTS) == before


_COUNTED = """
from sharded_orm import runtime
wrapper = connections["accounts_00000"]
if wrapper.vendor == "postgresql":
    (table,) = [t for t in wrapper.table_sizes(runtime.shard("accounts", 0)) if t.name == "library_account"]
    print(table.rows == execute(wrapper.alias, "SELECT COUNT(*) FROM library_account")[0][0], table.rows)
"""


def test_the_server_counts_the_moved_rows_once(site: Site) -> None:
    site.run(_TEXT_KEYS)
    site.move("accounts", "0", "--to", "db2")
    counted = site.run(_COUNTED)
    assert not counted or counted.startswith("True"), counted


# ##### Faults #####

#: Changes the rows on their way to the target, as a wrong copier would.
_FAULTY = """
from sharded_orm.backends.row_access import RowAccess
from sharded_orm.operations import shard_moves
store = RowAccess.store
calls = 0
def faulty(self, table, rows, gone=()):
    global calls
    names = [column.name for column in self.columns(table)]
    if "amount" in names and rows:
        calls += 1
        rows = [list(row) for row in rows]
        {change}
    store(self, table, rows, gone)
RowAccess.store = faulty
print(json.dumps(shard_moves.move_shards("accounts", [0], "db2").to_json()))
"""
FAULTS = {
    "a row is missing": "rows = rows[1:]",
    "the last row is missing": "rows = rows[:-1]",
    "a number differs": "rows[0][names.index('amount')] = 77",
    "an id differs": "rows[0][names.index('id')] = 77777",
    "a row too many": "rows.append([88888 if n == 'id' else v for n, v in zip(names, rows[0])])",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_copy_is_not_published(site: Site, fault: str) -> None:
    before = site.rows(*ACCOUNTS)
    done = site.python("run", PREAMBLE + _FAULTY.format(change=FAULTS[fault]))
    assert done.code == 0, done.err
    if fault == "a row too many" and site.backend == "sqlite3":
        # All tables are compared at the switch, because triggers do not see REPLACE. Rows that differ
        # are copied again: the wrong row is deleted.
        assert done.json["moved"] == {"0": "db2"}
        assert site.rows(*ACCOUNTS) == before
        return
    assert "the copy differs from the source. library_order: " in done.json["failures"]["0"]
    assert site.place(0) == "db1"
    assert site.rows(*ACCOUNTS) == before
    assert site.left() == ""


_MEANWHILE = """
from sharded_orm.operations import shard_moves
from sharded_orm.operations.shard_moves.shard_mover import ShardMover
copy = ShardMover._copy
def copying(self):
    copy(self)
    {change}
ShardMover._copy = copying
print(json.dumps(shard_moves.move_shards("accounts", [0], "db2").to_json()))
"""


@pytest.mark.parametrize(
    "change",
    ["TRUNCATE TABLE library_order", "ALTER TABLE library_order ADD COLUMN other INT"],
)
def test_a_table_that_is_altered_meanwhile_is_not_published(site: Site, change: str) -> None:
    if site.backend == "sqlite3" and change.startswith("TRUNCATE"):
        change = "DROP TABLE library_order"
    done = site.python(
        "run", PREAMBLE + _MEANWHILE.format(change=f"execute('accounts_00000', {change!r})")
    )
    assert done.code == 0, done.err
    assert done.json["failures"], done.out
    assert site.place(0) == "db1"
    assert site.left() == ""


def test_rows_that_exchange_unique_values_meanwhile_are_copied(site: Site) -> None:
    site.run("""
execute("books_00003", "CREATE TABLE swapped (id INT PRIMARY KEY, number INT UNIQUE)")
for n in range(2200):
    execute("books_00003", "INSERT INTO swapped VALUES (%s, %s)", n, n)
""")
    done = site.python(
        "run",
        PREAMBLE
        + """
from sharded_orm.backends.row_access import RowAccess
from sharded_orm.operations import shard_moves
read = RowAccess.read
def reading(self, table, key, limit, after=()):
    rows = read(self, table, key, limit, after)
    if table.name == "swapped" and not after:
        for statement in ("SET number = -1 WHERE id = 0", "SET number = 0 WHERE id = 2199", "SET number = 2199 WHERE id = 0"):
            execute("books_00003", f"UPDATE swapped {statement}")
    return rows
RowAccess.read = reading
print(json.dumps(shard_moves.move_shards("books", [3], "db1").to_json()))
""",
    )
    assert done.code == 0, done.err
    assert done.json["ok"], done.out
    said = site.run(
        "print(execute('books_00003', 'SELECT * FROM swapped WHERE id IN (0, 2199) ORDER BY id'))"
    )
    assert [tuple(row) for row in eval(said)] == [(0, 2199), (2199, 0)]


# ##### Refusals #####


def test_what_is_refused_is_listed_and_nothing_is_changed(site: Site) -> None:
    def refused(*arguments: str) -> list[str]:
        done = site.move(*arguments, "--json", code=1)
        assert "Traceback" not in done.err
        problems: list[str] = done.json["problems"]
        return problems

    assert "no shard 9:" in refused("accounts", "9", "--to", "db2")[0]
    (beyond,) = refused("accounts", "0-99,7", "--to", "db2")
    assert "no shard 4-99:" in beyond
    assert "no node 'db9'" in refused("accounts", "0", "--to", "db9")[0]
    site.run("""
execute("accounts_00000", "CREATE VIEW seen AS SELECT * FROM library_order")
execute("accounts_00001", "CREATE TABLE keyless (n INT)")
""")
    view, keyless = refused("accounts", "0-1", "--to", "db2")
    assert "view 'seen'" in view and "shard 0" in view
    assert "'keyless' has no primary key" in keyless and "shard 1" in keyless
    assert site.left() == ""
    assert "Name the shards" in site.move("accounts", code=1).err


def test_a_schema_that_is_there_already_is_not_overwritten(site: Site) -> None:
    site.run("""
from sharded_orm import runtime
from dataclasses import replace
from sharded_orm.operations.shard_moves.shard_sessions import SchemaSessions
with SchemaSessions(replace(runtime.shard("accounts", 0), node="db2"), print) as sessions:
    sessions.wrapper.create_shard_database()
    with sessions.wrapper.cursor() as cursor:
        cursor.execute("CREATE TABLE precious (id INT PRIMARY KEY)")
""")
    (problem,) = site.move("accounts", "0", "--to", "db2", "--json", code=1).json["problems"]
    assert "'precious'" in problem


def test_it_does_not_begin_beside_a_migration_or_moves_of_keys(site: Site) -> None:
    for kind in ("migrate", "move keys", "promote", "grow"):
        subject = "primaries" if kind == "promote" else "accounts"
        done = site.python(
            "run",
            PREAMBLE
            + f"""
from sharded_orm.exceptions import OperationHeld
from sharded_orm.operations import shard_moves
from sharded_orm.operations.runs import journal
with journal.hold_run({kind!r}, {subject!r}, {{}}) as run:
    try:
        shard_moves.move_shards("accounts", [0], "db2")
    except OperationHeld as error:
        print({kind!r} in str(error))
    run.finish()
""",
        )
        assert done.out.strip() == "True", (kind, done.err)
        done = site.python(
            "run",
            PREAMBLE
            + f"""
from sharded_orm.exceptions import OperationHeld
from sharded_orm.operations.runs import journal
from sharded_orm.operations.runs.conflicts import refuse_conflicts
with journal.hold_run("move shards", "accounts", {{}}) as run:
    with journal.hold_run({kind!r}, {subject!r}, {{}}) as other:
        try:
            refuse_conflicts(other)
        except OperationHeld as error:
            print("move shards" in str(error))
    run.finish()
""",
        )
        assert done.out.strip() == "True", (kind, done.err)


def test_a_source_that_commands_do_not_write_is_refused(site: Site) -> None:
    path = site.folder / "file.json"
    path.write_text(site.manage("topology", "pull").out)
    site.content["sharded_orm"]["TOPOLOGY"] = {"SOURCE": "file", "OPTIONS": {"PATH": str(path)}}
    site.save()
    done = site.move("accounts", "0", "--to", "db2", code=1)
    assert "Shards cannot be moved with" in done.err
    assert "'database' or 'zookeeper'" in done.err


def test_check_moves_nothing(site: Site) -> None:
    done = site.move("accounts", "0-2", "--to", "db2", "--check")
    assert done.out.splitlines() == [
        "shard 0 of group 'accounts' from db1 to db2",
        "shard 1 of group 'accounts' from db1 to db2",
        "1 shards are there already.",
        "Nothing was changed.",
    ]
    assert site.place(0) == "db1"
    assert site.left() == ""


def test_tables_of_moved_keys_go_with_the_old_tables(site: Site) -> None:
    site.content["sharded_orm"]["PLACEMENT_LEASE"] = 0.5
    site.save()
    site.manage("keys", "move", "books", "3", "--to", "1")
    site.move("books", "1", "--to", "db2", "--keep", "0")
    site.move("books", "--cleanup")
    assert not [line for line in site.left().splitlines() if line.startswith("books_00001 ")]
