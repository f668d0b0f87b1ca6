"""Copies of the rows of a key from one schema to another, and faults in them that are found."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from django.db import IntegrityError

from sharded_orm.backends.change_capture import CapturedTable, KeyLink
from sharded_orm.backends.row_copy import ChangedRows, RowCopy
from sharded_orm.exceptions import MoveFailed
from tests.integration.moves.database import (
    Database,
    copy_digests,
    copy_rows,
    database_on,
    refuses,
    run,
)
from tests.patience import PATIENCE

KEY = "Ada"
LARGE = 2**62 + 1
PHOTO = CapturedTable("photo", ("id",), "owner")
VOTE = CapturedTable("vote", ("owner", "word"), "owner")
LABEL = CapturedTable("label", ("id",), "owner", (KeyLink("photo_id", "photo", "id"),))
TABLES = (PHOTO, VOTE, LABEL)
COLUMNS = {
    "sqlite": "body text, raw blob, price decimal, ratio real, done bool, taken datetime",
    "read committed": "body VARCHAR(200) CHARACTER SET latin1, raw LONGBLOB, price DECIMAL(20, 5),"
    " ratio FLOAT, done BIT(3), taken DATETIME(6), seen TIMESTAMP(6) NULL, twin UUID,"
    " size INT AS (LENGTH(raw)) STORED",
    "postgresql read committed": "body text, raw bytea, price numeric, ratio real, done smallint,"
    " taken timestamp, size int GENERATED ALWAYS AS (length(raw)) STORED",
}
BYTES = {"sqlite": "X'00'", "read committed": "X'00'", "postgresql read committed": r"'\x00'"}
KEY_TYPE = {
    "sqlite": "VARCHAR(20)",
    "read committed": "VARCHAR(20) CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci",
    "postgresql read committed": "VARCHAR(20) COLLATE nocase",
}
BACKENDS = list(KEY_TYPE)
#: A query that finds a session which waits for a row that it is to delete.
WAITS = {
    "read committed": "SELECT 1 FROM information_schema.processlist WHERE db = DATABASE()"
    " AND time_ms > 100 AND info LIKE 'DELETE FROM `vote`%'",
    "postgresql read committed": "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    """ AND query LIKE 'DELETE FROM "vote"%'""",
}


def schema(backend: str) -> tuple[str, ...]:
    owner = f"owner {KEY_TYPE[backend]} NOT NULL"
    collation = "CREATE COLLATION nocase (PROVIDER = icu, LOCALE = 'und-u-ks-level2', DETERMINISTIC = false)"
    return (
        *([collation] if backend.startswith("postgresql") else []),
        f"CREATE TABLE photo (id BIGINT NOT NULL PRIMARY KEY, {owner}, slug VARCHAR(9) UNIQUE,"
        f" {COLUMNS[backend]})",
        f"CREATE TABLE vote ({owner}, word VARCHAR(20) NOT NULL, PRIMARY KEY (owner, word))",
        "CREATE TABLE label (id BIGINT NOT NULL PRIMARY KEY,"
        " photo_id BIGINT NOT NULL REFERENCES photo (id))",
    )


class Pair:
    """The source, whose key ``Ada`` has rows of every kind, and an empty target."""

    def __init__(self, source: Database, target: Database, backend: str) -> None:
        self.source, self.target, self.backend = source, target, backend
        self.reader, self.writer = source.copy(), target.copy()
        self.at_source, self.at_target = source.session(), target.session()

    def copy(self, number: int = 1) -> None:
        self.writer.prepare(TABLES)
        for table in TABLES:
            after: tuple[Any, ...] = ()
            while rows := self.reader.read(table, KEY, 2, after):
                self.writer.put(table, number, rows)
                after = self.reader.pk_of(table, rows[-1])

    def differing(self, number: int = 1) -> list[str]:
        return [
            table.name
            for table in TABLES
            if self.reader.key_digests(table, KEY) != copy_digests(self.writer, table, number)
        ]


@pytest.fixture(params=BACKENDS)
def pair(request: pytest.FixtureRequest, tmp_path: Path, django_db_blocker: Any) -> Iterator[Pair]:
    tables = schema(request.param)
    with (
        django_db_blocker.unblock(),
        database_on(request.param, request, tmp_path / "1.sqlite3", tables) as source,
        database_on(request.param, request, tmp_path / "2.sqlite3", tables) as target,
    ):
        pair = Pair(source, target, request.param)
        insert = "INSERT INTO photo (id, owner, slug, body, raw, price, ratio, done, taken) VALUES"
        marks = "(%s, %s, %s, %s, %s, %s, %s, %s, %s)"
        reader: RowCopy = pair.reader  # Its session stores an id of 0 as it is.
        for row in (
            (0, KEY, "a", "", b"", "0", 0.1, 0, "2026-03-29 02:30:00.000001"),
            (LARGE, KEY, "b", "caf\xe9, 'x' \\", bytes(range(256)), "1.50000", 1 / 3, 5, None),
            (3, KEY, None, None, None, None, None, None, None),
            (4, "ada", "c", "another key", b"x", "1", 1.0, 1, None),
        ):
            reader._rows(f"{insert} {marks}", *row)
        for statement in (
            "INSERT INTO vote VALUES ('Ada', 'a'), ('Ada', 'b'), ('Bob', 'a')",
            f"INSERT INTO label VALUES (1, 0), (2, {LARGE}), (3, 4)",
        ):
            run(pair.at_source, statement)
        yield pair


def contents(session: Any) -> list[Any]:
    return [run(session, f"SELECT * FROM {table.name} ORDER BY 1, 2") for table in TABLES]


def test_a_copy_is_equal_and_only_of_the_key(pair: Pair) -> None:
    pair.copy()
    assert pair.differing() == []
    counts = [copy_digests(pair.writer, table, 1).count for table in TABLES]
    assert counts == [3, 2, 2]
    assert contents(pair.at_target) == [[], [], []]


def test_published_and_set_aside_the_rows_have_moved(pair: Pair) -> None:
    before = contents(pair.at_source)
    pair.copy()
    fences = pair.source.capture(), pair.target.capture()
    for capture in fences:
        capture.prepare()
        capture.watch(1, KEY, closed=True)
        capture.install(TABLES, PATIENCE)
    pair.writer.publish(TABLES, 1)
    assert [pair.writer.key_digests(table, KEY).count for table in TABLES] == [3, 2, 2]
    pair.reader.prepare(TABLES)
    pair.reader.set_aside(TABLES, 1, KEY)
    pair.reader.set_aside(TABLES, 1, KEY)
    for table in TABLES:
        assert copy_digests(pair.reader, table, 1) == pair.writer.key_digests(table, KEY)
    left, moved = contents(pair.at_source), contents(pair.at_target)
    assert [sorted(map(repr, [*a, *b])) for a, b in zip(left, moved, strict=True)] == [
        sorted(map(repr, rows)) for rows in before
    ]
    # Nobody else passes a closed fence meanwhile.
    assert [capture.fences() for capture in fences] == [{1: "closed"}] * 2
    for session in (pair.at_source, pair.at_target):
        assert refuses(session, "INSERT INTO vote VALUES ('Ada', 'z')")


@pytest.mark.parametrize("pair", ["read committed"], indirect=True)
def test_the_fence_is_not_read_for_each_row_that_is_published(pair: Pair) -> None:
    """Writes of the key wait until all of its rows are published."""
    words = ", ".join(f"('{KEY}', 'word {number}')" for number in range(100))
    run(pair.at_source, f"INSERT INTO vote VALUES {words}")
    pair.copy()
    capture = pair.target.capture()
    capture.prepare()
    capture.watch(1, KEY, closed=True)
    capture.install(TABLES, PATIENCE)

    def look_ups() -> int:
        ((_, count),) = run(pair.writer._connection, "SHOW SESSION STATUS LIKE 'Handler_read_key'")
        return int(count)

    before = look_ups()
    pair.writer.publish(TABLES, 1)
    assert look_ups() - before < 100
    # Afterwards, the fence refuses this session like all others.
    assert refuses(pair.writer._connection, "INSERT INTO vote VALUES ('Ada', 'z')")
    with pytest.raises(IntegrityError):
        pair.writer.publish(TABLES, 1)
    assert refuses(pair.writer._connection, "INSERT INTO vote VALUES ('Ada', 'z')")


@pytest.mark.parametrize("pair", BACKENDS[1:], indirect=True)
@pytest.mark.parametrize("change", ["set_aside", "withdraw"])
def test_a_writer_that_has_locked_a_row_is_refused_at_once(pair: Pair, change: str) -> None:
    """If the writer waited for the fence, the mover for the row, one of them would be a deadlock's."""
    capture = pair.source.capture()
    capture.prepare()
    capture.watch(1, KEY, closed=True)
    capture.install(TABLES, PATIENCE)
    pair.reader.prepare(TABLES)
    writer = pair.at_source
    run(writer, "START TRANSACTION")
    run(writer, "SELECT * FROM vote WHERE owner = 'Ada' FOR UPDATE")
    with ThreadPoolExecutor() as executor:
        mover = executor.submit(getattr(pair.reader, change), TABLES, 1, KEY)
        waits = WAITS[pair.backend]
        observer = pair.source.session()
        while not run(observer, waits) and not mover.done():
            pass
        assert refuses(writer, "UPDATE vote SET word = 'z' WHERE owner = 'Ada' AND word = 'a'")
        run(writer, "ROLLBACK")
        mover.result(PATIENCE)
    assert pair.reader.key_digests(VOTE, KEY).count == 0


def _publish(pair: Pair) -> None:
    """Publish photos and votes, but no labels, and change the source afterwards."""
    pair.copy()
    capture = pair.target.capture()
    capture.prepare()
    capture.watch(1, KEY, closed=True)
    capture.install(TABLES, PATIENCE)
    pair.writer.publish([PHOTO, VOTE], 1)
    # Two rows exchange a unique value.
    for pk, slug in ((0, "x"), (LARGE, "a"), (0, "b")):
        run(pair.at_source, f"UPDATE photo SET slug = '{slug}' WHERE id = {pk}")
    for statement in (
        "UPDATE photo SET body = 'new', price = 7 WHERE id = 3",
        "INSERT INTO photo (id, owner, slug) VALUES (8, 'Ada', 'd')",
        "DELETE FROM vote WHERE word = 'b'",
        "DELETE FROM label WHERE id = 1",
    ):
        run(pair.at_source, statement)


def _changes(pair: Pair) -> list[ChangedRows]:
    return [
        ChangedRows(table, pks, pair.reader.read_again(table, KEY, pks))
        for table, pks in (
            (PHOTO, [("0",), (str(LARGE),), ("3",), ("8",), ("9",)]),
            (VOTE, [("Ada", "b")]),
            (LABEL, [("1",)]),
        )
    ]


def test_published_rows_are_changed_and_other_tables_published(pair: Pair) -> None:
    _publish(pair)
    # The journal names a row that is gone. Another key has one with its primary key here.
    run(pair.at_target, "INSERT INTO photo (id, owner, slug) VALUES (9, 'Bob', 'bob')")
    pair.writer.complete(1, _changes(pair), [LABEL])
    for table in TABLES:
        assert pair.writer.key_digests(table, KEY) == pair.reader.key_digests(table, KEY)
        assert copy_digests(pair.writer, table, 1) == pair.reader.key_digests(table, KEY)
    assert run(pair.at_target, "SELECT owner FROM photo WHERE id = 9") == [("Bob",)]
    assert pair.target.capture().fences() == {1: "closed"}
    assert refuses(pair.at_target, "UPDATE photo SET body = 'late' WHERE id = 8")


@pytest.mark.parametrize("obstacle", ["taken", "open"])
def test_published_rows_stay_if_the_last_state_cannot_be_published(
    pair: Pair, obstacle: str
) -> None:
    _publish(pair)
    if obstacle == "taken":
        run(pair.at_target, "INSERT INTO photo (id, owner, slug) VALUES (8, 'Bob', 'bob')")
    else:
        pair.target.capture().reopen(1)
    before = contents(pair.at_target)
    with pytest.raises(IntegrityError if obstacle == "taken" else MoveFailed):
        pair.writer.complete(1, _changes(pair), [LABEL])
    assert contents(pair.at_target) == before


def test_rows_that_have_changed_are_copied_again(pair: Pair) -> None:
    pair.copy()
    run(pair.at_source, "UPDATE photo SET body = 'new' WHERE id = 0")
    run(pair.at_source, "DELETE FROM vote WHERE owner = 'Ada' AND word = 'b'")
    run(pair.at_source, f"UPDATE label SET photo_id = 4 WHERE photo_id = {LARGE}")
    assert pair.differing() == ["photo", "vote", "label"]
    for table, pks in ((PHOTO, [("0",)]), (VOTE, [("Ada", "b")]), (LABEL, [("2",)])):
        rows = pair.reader.read_again(table, KEY, pks)
        pair.writer.remove(table, 1, pks)
        pair.writer.put(table, 1, rows)
    assert pair.differing() == []


@pytest.mark.parametrize(
    "fault",
    [
        "UPDATE {0} SET body = 'Caf\xe9' WHERE body LIKE 'caf%%'",
        "UPDATE {0} SET body = '' WHERE body IS NULL",
        "UPDATE {0} SET price = 0 WHERE price IS NULL",
        "UPDATE {0} SET taken = '2026-03-29 03:30:00.000001' WHERE id = 0",
        "UPDATE {0} SET raw = {1} WHERE id = 0",
        f"UPDATE {{0}} SET id = {LARGE - 1} WHERE id = {LARGE}",
        "UPDATE {0} SET id = 1 WHERE id = 0",
        "UPDATE {0} SET ratio = 0.3333 WHERE ratio > 0.2",
        "DELETE FROM {0} WHERE id = 3",
    ],
)
def test_each_fault_is_found_and_its_row_is_named(pair: Pair, fault: str) -> None:
    pair.copy()
    side = pair.writer._side(PHOTO)
    pair.writer._rows(fault.format(side, BYTES[pair.backend]).replace("%%", "%"))
    assert pair.differing() == ["photo"]
    expected, copied = pair.reader.key_rows(PHOTO, KEY), copy_rows(pair.writer, PHOTO, 1)
    assert {pk for pk in {*expected, *copied} if expected.get(pk) != copied.get(pk)}


def test_a_row_that_is_there_twice_is_found(pair: Pair) -> None:
    pair.copy()
    pair.writer.put(VOTE, 1, [("Ada", "c")])
    assert pair.differing() == ["vote"]


@pytest.mark.parametrize("taken", ["(9, 'Bob', 'a')", "(3, 'Bob', 'z')"])
def test_a_taken_id_or_unique_value_is_never_overwritten(pair: Pair, taken: str) -> None:
    run(pair.at_target, f"INSERT INTO photo (id, owner, slug) VALUES {taken}")
    before = contents(pair.at_target)
    pair.copy()
    with pair.target.capture() as capture:
        capture.prepare()
        capture.watch(1, KEY, closed=True)
    with pytest.raises(IntegrityError):
        pair.writer.publish(TABLES, 1)
    assert contents(pair.at_target) == before
    pair.writer.discard(TABLES, 1)
    assert copy_digests(pair.writer, PHOTO, 1).count == 0


@pytest.mark.parametrize("left", ["no fence", "an open fence"])
def test_nothing_passes_without_a_closed_fence(pair: Pair, left: str) -> None:
    """A process that was silent for too long must not go on when another has undone its move."""
    pair.copy()
    pair.reader.prepare(TABLES)
    before = contents(pair.at_source)
    for database in (pair.source, pair.target):
        with database.capture() as capture:
            capture.prepare()
            if left == "an open fence":
                capture.watch(1, KEY)
    with pytest.raises(MoveFailed, match="is not closed"):
        pair.writer.publish(TABLES, 1)
    with pytest.raises(MoveFailed, match="is not closed"):
        pair.reader.set_aside(TABLES, 1, KEY)
    assert contents(pair.at_source) == before
    assert contents(pair.at_target) == [[], [], []]


def test_copies_of_two_times_lie_beside_each_other(pair: Pair) -> None:
    pair.copy(1)
    run(pair.at_source, "UPDATE photo SET body = 'new' WHERE id = 0")
    pair.copy(2)
    assert pair.differing(1) == ["photo"]
    assert pair.differing(2) == []
    pair.writer.discard(TABLES, 1)
    assert pair.differing(2) == []


def test_numbers_are_read_in_the_order_of_numbers(pair: Pair) -> None:
    """Values cross as text, of which 10 is smaller than 9."""
    numbers = [2, 9, 10, 82, 100, 1000]
    values = ", ".join(f"({number}, 'Eve')" for number in numbers)
    run(pair.at_source, f"INSERT INTO photo (id, owner) VALUES {values}")
    read: list[Any] = []
    after: tuple[Any, ...] = ()
    while rows := pair.reader.read(PHOTO, "Eve", 2, after):
        read += [int(pair.reader.pk_of(PHOTO, row)[0]) for row in rows]
        after = pair.reader.pk_of(PHOTO, rows[-1])
    assert read == numbers
    run(pair.at_source, "DELETE FROM label")
    run(pair.at_source, "DELETE FROM photo WHERE owner <> 'Eve'")
    ends, after = [], ()
    while after := pair.reader.boundary(PHOTO, after, 2):
        ends.append(int(after[0]))
    assert ends == [9, 82, 1000]


def test_the_order_of_the_columns_does_not_matter(pair: Pair) -> None:
    """A migration adds a column at the end of one shard, and creates another shard with it."""
    for session in (pair.at_source, pair.at_target):
        run(session, "DROP TABLE vote")
    columns = ("owner VARCHAR(20) NOT NULL", "word VARCHAR(20) NOT NULL", "note VARCHAR(20)")
    for session, order in ((pair.at_source, (0, 1, 2)), (pair.at_target, (2, 1, 0))):
        elements = ", ".join(columns[place] for place in order)
        run(session, f"CREATE TABLE vote ({elements}, PRIMARY KEY (owner, word))")
    run(pair.at_source, "INSERT INTO vote (owner, word, note) VALUES ('Ada', 'a', 'n')")
    pair.reader, pair.writer = pair.source.copy(), pair.target.copy()
    pair.copy()
    assert pair.differing() == []
    with pair.target.capture() as capture:
        capture.prepare()
        capture.watch(1, KEY, closed=True)
    pair.writer.publish(TABLES, 1)
    assert run(pair.at_target, "SELECT owner, word, note FROM vote") == [("Ada", "a", "n")]
    run(pair.at_target, "DELETE FROM vote")
    pair.writer.store(VOTE, pair.reader.read(VOTE, KEY, 10))
    assert run(pair.at_target, "SELECT owner, word, note FROM vote") == [("Ada", "a", "n")]
    assert pair.reader.rows_of(VOTE, [("Ada", "a")]) == pair.writer.rows_of(VOTE, [("Ada", "a")])


def test_a_copy_is_removed_although_its_table_has_another_form_by_now(pair: Pair) -> None:
    pair.copy(1)
    pair.copy(2)
    run(pair.at_source, "ALTER TABLE photo ADD COLUMN later INT")
    run(pair.at_target, "ALTER TABLE photo ADD COLUMN later INT")
    pair.reader, pair.writer = pair.source.copy(), pair.target.copy()
    pair.copy(2)

    def kept() -> dict[int, int]:
        counts: dict[int, int] = {}
        for table in pair.writer._side_tables():
            for number, count in run(
                pair.at_target, f"SELECT sharded_orm_copy, COUNT(*) FROM {table} GROUP BY 1"
            ):
                counts[number] = counts.get(number, 0) + count
        return counts

    photos = len(pair.reader.key_rows(PHOTO, KEY))
    before = kept()
    pair.writer.discard_everywhere(1)
    assert kept() == {2: before[1] + photos}


#: Definitions of a table beside its columns, and whether it may be published before the switch.
EARLY = {
    "a key of its own": ("", True),
    "unique per key": (", UNIQUE (owner, word)", True),
    # Another key may take such a value, which this key has given up on the source, until the switch.
    "unique for all keys": (", UNIQUE (word)", False),
    "unique twice": (", UNIQUE (owner, photo_id), UNIQUE (word)", False),
}


@pytest.mark.parametrize("definition", EARLY)
def test_rows_with_unique_values_of_all_keys_come_at_the_switch(
    pair: Pair, definition: str
) -> None:
    clause, may = EARLY[definition]
    run(pair.at_target, f"{_EARLY_TABLE}{clause})")
    assert pair.writer.may_publish_early(CapturedTable("early", ("id",), "owner")) is may


_EARLY_TABLE = (
    "CREATE TABLE early (id BIGINT NOT NULL PRIMARY KEY, owner VARCHAR(20) NOT NULL,"
    " word VARCHAR(20), photo_id BIGINT"
)


@pytest.mark.parametrize("pair", BACKENDS[2:], indirect=True)
@pytest.mark.parametrize(
    ("action", "may"),
    [
        ("DEFERRABLE INITIALLY DEFERRED", True),
        ("ON DELETE CASCADE DEFERRABLE", False),
        ("ON UPDATE SET NULL DEFERRABLE", False),
        ("", False),
    ],
)
def test_rows_with_foreign_keys_that_act_at_once_come_at_the_switch(
    pair: Pair, action: str, may: bool
) -> None:
    """A published row that changes is deleted and stored anew, which calls such a foreign key."""
    run(pair.at_target, "DROP TABLE label")
    run(
        pair.at_target,
        f"{_EARLY_TABLE}, FOREIGN KEY (photo_id) REFERENCES photo (id) {action})",
    )
    # The other unique value of photos counts as their key here, because this is not about it.
    for table in (
        CapturedTable("early", ("id",), "owner"),
        CapturedTable("photo", ("id",), "slug"),
    ):
        assert pair.writer.may_publish_early(table) is may
