"""Values of PostgreSQL's types are copied exactly, and new ids are above the published ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sharded_orm.backends.change_capture import CapturedTable
from tests.integration.moves.database import Database, database_on, run

EVERY = CapturedTable("every", ("id",), "owner")
COUNTED = CapturedTable("counted", ("id",), "owner")
#: A type, and texts of values that are different although some of them are equal for the server.
VALUES = {
    "numeric": ["1.5", "1.50", "NaN", "Infinity", "-0.000", "1e-30"],
    "double precision": ["0.1", "0.30000000000000004", "-0", "0", "NaN", "1e308", "5e-324"],
    "real": ["0.1", "16777217", "-Infinity"],
    "citext": ["Ada", "ADA"],
    'text COLLATE "nocase"': ["Ada", "ADA", "", " ", "\\x", "a''b"],
    "character(5)": ["a", "abcde", " a"],
    "bpchar": ["a", "a ", "a  "],
    "character varying": ["a", "a "],
    "json": ['{"a":1}', '{ "a": 1 }', '{"a":1,"a":2}', "null"],
    "jsonb": ['{"a": 1}', '{"a": 1.0}', "null", '"x"'],
    "bytea": [r"\\x00ff", r"\\x", r"\\x5c78"],
    "integer[]": ["{1,2}", "[0:1]={1,2}", "{{1},{2}}", "{NULL}", "{}"],
    "text[]": ['{"a,b"}', '{a,b}', '{"NULL"}', "{NULL}", '{""}'],
    "mood": ["sad", "happy"],
    "int4range": ["[1,5)", "empty", "(,)"],
    "nummultirange": ["{[1.0,2.0)}", "{[1,2)}", "{}"],
    "timestamptz": ["2026-03-29 01:30:00.000001+00", "infinity", "0044-03-15 00:00:00+00 BC"],
    "timestamp": ["2026-03-29 02:30:00", "-infinity"],
    "timetz": ["10:00:00+00", "12:00:00+02"],
    "interval": ["1 mon", "30 days", "720:00:00", "-1 days +02:03:04.000005"],
    "date": ["infinity", "2026-02-28"],
    "bit(3)": ["101", "000"],
    "bit varying": ["1", "01"],
    "boolean": ["t", "f"],
    "uuid": ["00000000-0000-0000-0000-00000000002a"],
    "inet": ["10.0.0.1", "10.0.0.1/24", "::1"],
    "cidr": ["10.0.0.0/8"],
    "money": ["12.34", "-5"],
    "hstore": ['a=>1', 'a=>NULL', 'a=>"NULL"'],
    "tsvector": ["''a'':1 ''b'':2A"],
    "xml": ["<a/>", "<a></a>"],
    "point": ["(0.1,1e-300)"],
    "place": ['(1,"a ""b""")', '(1,)', '(1,"")'],
    "small": ["1", "2"],
}  # fmt: skip
SCHEMA = (
    "CREATE COLLATION nocase (PROVIDER = icu, LOCALE = 'und-u-ks-level2', DETERMINISTIC = false)",
    "CREATE TYPE mood AS ENUM ('sad', 'happy')",
    "CREATE TYPE place AS (number int, name text)",
    "CREATE DOMAIN small AS smallint CHECK (VALUE < 9)",
    "CREATE TABLE every (id bigint PRIMARY KEY, owner int NOT NULL,"
    + ", ".join(f"v{number} {kind}" for number, kind in enumerate(VALUES))
    + ")",
    "CREATE TABLE counted (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, owner int NOT NULL,"
    " number serial, other bigint, twice bigint GENERATED ALWAYS AS (owner * 2) STORED)",
    "CREATE SEQUENCE others OWNED BY counted.other",
    "ALTER TABLE counted ALTER COLUMN other SET DEFAULT nextval('others') * 1000",
)


@pytest.fixture
def pair(
    request: pytest.FixtureRequest, tmp_path: Path, django_db_blocker: Any
) -> Iterator[tuple[Database, Database]]:
    with django_db_blocker.unblock():
        import psycopg

        address = request.getfixturevalue("postgresql")
        with psycopg.connect(**address.psycopg(), autocommit=True) as admin:
            for extension in ("citext", "hstore"):
                admin.execute(
                    f"CREATE EXTENSION IF NOT EXISTS {extension} SCHEMA pg_catalog".encode()
                )
        level = "postgresql read committed"
        with (
            database_on(level, request, tmp_path, SCHEMA) as source,
            database_on(level, request, tmp_path, SCHEMA) as target,
        ):
            yield source, target


def test_each_value_is_the_same_and_no_other(pair: tuple[Database, Database]) -> None:
    source, target = pair
    session, writer = source.session(), target.copy()
    # Settings of an account, which change the texts of values.
    source._settings["OPTIONS"]["options"] += (
        " -c extra_float_digits=-10 -c DateStyle=German -c TimeZone=Asia/Tokyo -c bytea_output=escape"
        " -c IntervalStyle=sql_standard -c lc_monetary=C"
    )
    reader = source.copy()
    number = 0
    for place, texts in enumerate(VALUES.values()):
        for text in texts:
            run(session, f"INSERT INTO every (id, owner, v{place}) VALUES ({number}, 7, '{text}')")
            number += 1
    run(session, f"INSERT INTO every (id, owner) VALUES ({number}, 7)")
    rows = reader.read(EVERY, 7, 1000)
    assert len(rows) == number + 1
    writer.store(EVERY, rows)
    assert writer.key_digests(EVERY, 7) == reader.key_digests(EVERY, 7)
    assert writer.key_rows(EVERY, 7) == reader.key_rows(EVERY, 7)
    query = "SELECT every::text FROM every ORDER BY id"
    assert run(target.session(), query) == run(session, query)
    # All values of a type have digests of their own.
    run(session, "UPDATE every SET id = -id - 1")
    for first in rows:
        twins = [row for row in rows if row != first and row[1:] == first[1:]]
        assert not twins
    digests = _digests_without_id(session, reader)
    assert len(set(digests)) == len(digests)


def _digests_without_id(session: Any, reader: Any) -> list[str]:
    columns = reader.columns(EVERY)
    reader._columns["every"] = tuple(column for column in columns if column.name != "id")
    rows = run(session, "SELECT 1")  # The session is there.
    assert rows == [(1,)]
    digests = reader._rows(f"SELECT {reader._row_digest(EVERY)} FROM every")
    reader._columns["every"] = columns
    return [digest for (digest,) in digests]


@pytest.fixture
def published(pair: tuple[Database, Database]) -> Any:
    """A function that publishes rows with given ids on the target, and returns a session there."""

    def publish(*ids: int) -> Any:
        source, target = pair
        session = source.session()
        for number in ids:
            run(
                session,
                "INSERT INTO counted (id, owner, number) OVERRIDING SYSTEM VALUE"
                f" VALUES ({number}, 7, {number % 1000})",
            )
        writer, capture = target.copy(), target.capture()
        writer.prepare([COUNTED])
        writer.put(COUNTED, 1, source.copy().read(COUNTED, 7, 100))
        capture.prepare()
        capture.watch(1, 7, closed=True)
        writer.publish([COUNTED], 1)
        capture.unwatch(1)
        return target.session()

    return publish


@pytest.mark.parametrize("largest", [1, 2, 5, 1000, 50_000, 2**40])
@pytest.mark.parametrize("used", [0, 1, 3])
def test_new_ids_are_above_those_that_were_published(
    pair: tuple[Database, Database], published: Any, largest: int, used: int
) -> None:
    session = pair[1].session()
    for _ in range(used):
        run(session, "SELECT nextval('counted_id_seq')")
    published(largest)
    ((number,),) = run(session, "INSERT INTO counted (owner) VALUES (8) RETURNING id")
    assert number == max(largest, used) + 1
    # The values of a column may be no numbers of its sequence.
    ((number, other),) = run(
        session, "INSERT INTO counted (owner) VALUES (8) RETURNING number, other"
    )
    assert (number, other) == (largest % 1000 + 2, 2000)


def test_a_sequence_that_is_ahead_stays(pair: tuple[Database, Database], published: Any) -> None:
    session = pair[1].session()
    run(session, "SELECT setval('counted_id_seq', 70)")
    published(3)
    ((number,),) = run(session, "INSERT INTO counted (owner) VALUES (8) RETURNING id")
    assert number == 71


def test_a_sequence_keeps_its_steps(pair: tuple[Database, Database], published: Any) -> None:
    session = pair[1].session()
    run(session, "ALTER TABLE counted ALTER COLUMN id SET INCREMENT BY 10")
    published(35)
    ((number,),) = run(session, "INSERT INTO counted (owner) VALUES (8) RETURNING id")
    assert number == 51
