"""Snapshots of schemas on PostgreSQL, schemas that are built from them, and digests of migrations."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import DatabaseError, ProgrammingError
from django.db.migrations.recorder import MigrationRecorder
from django.test.utils import CaptureQueriesContext

from sharded_orm.backends.postgresql import snapshot
from sharded_orm.backends.snapshot import OWN_PREFIX, SchemaSnapshot, applied_digest
from sharded_orm.backends.sqlstate import sqlstate_of
from sharded_orm.exceptions import RehearsalFailed
from sharded_orm.ids import timestamps_postgresql
from tests.integration.postgresql.rich_schema import SQL, create_models
from tests.integration.postgresql.schemas import Schemas, quoted, schemas_on
from tests.services.postgresql import Address

NASTY = ('S "0" 100%s', "Upper", "it's {shard}", "a.b", "ünïcode \\ x")


@pytest.fixture(scope="module")
def server(postgresql: Address, django_db_blocker: Any) -> Iterator[Schemas]:
    with django_db_blocker.unblock(), schemas_on(postgresql, f"snapshots_{os.getpid()}") as schemas:
        yield schemas


def rich(server: Schemas, name: str = "") -> str:
    schema = server.create(name)
    create_models(server.connection(schema))
    for statement in SQL:
        server.execute(schema, statement.replace("{schema}", quoted(schema)))
    return schema


@pytest.fixture(scope="module")
def rich_schema(server: Schemas) -> str:
    return rich(server)


@contextmanager
def queries(server: Schemas, schema: str) -> Iterator[CaptureQueriesContext]:
    with CaptureQueriesContext(server.connection(schema)) as captured:
        yield captured


def test_a_built_schema_shows_what_it_was_built_from(server: Schemas, rich_schema: str) -> None:
    original = server.read(rich_schema)
    copy = server.copy(rich_schema)
    assert server.read(copy).differences(original) == []
    assert server.read(copy).fingerprint == original.fingerprint
    # It can be repeated, and a copy is built as its original.
    server.build(copy, original)
    assert server.read(server.copy(copy)).differences(original) == []


def test_the_copy_works_as_the_original(server: Schemas, rich_schema: str) -> None:
    copy = server.copy(rich_schema)
    server.execute(
        copy, "INSERT INTO rich_author (name, slug, born) VALUES ('Ada', 'ada', '2020-1-1')"
    )
    with pytest.raises(DatabaseError, match="null_birth"):
        server.execute(
            copy, "INSERT INTO rich_author (name, slug, born) VALUES ('A', 'a', '2020-1-1')"
        )
    server.execute(copy, "INSERT INTO rich_author (name, slug) VALUES ('Bea', 'b')")
    assert server.execute(
        copy, "SELECT id, upper_name, rank, greeting FROM rich_author ORDER BY 1"
    ) == [
        (1, "ADA", 3, "a,\n  (b\n) and 'c' \\ %s"),
        (3, "BEA", 3, "a,\n  (b\n) and 'c' \\ %s"),
    ]
    server.execute(copy, 'INSERT INTO "Mixed Case" (n, number) VALUES (5, 1)')
    assert server.execute(copy, 'SELECT id, always, feeling FROM "Mixed Case"') == [(1, 7, "sad")]
    # The trigger's function writes into its own schema.
    assert server.execute(copy, "SELECT count(*) FROM ONLY unlogged") == [(3,)]
    assert server.execute(rich_schema, "SELECT count(*) FROM ONLY unlogged") == [(0,)]
    server.execute(copy, "INSERT INTO measured VALUES ('2025-05-05', 1)")
    assert server.execute(copy, "SELECT count(*) FROM measured_2025") == [(1,)]
    assert server.execute(copy, "SELECT name FROM from_function ORDER BY 1") == [("Ada",), ("Bea",)]


@pytest.mark.parametrize("name", NASTY)
def test_the_name_of_the_schema_does_not_matter(
    server: Schemas, rich_schema: str, name: str
) -> None:
    schema = rich(server, name)
    original = server.read(rich_schema)
    assert server.read(schema).differences(original) == []
    assert server.read(server.copy(schema)).differences(original) == []
    assert not any(name in text for text in server.read(schema).definitions.values())


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ("ALTER TABLE rich_author ALTER slug TYPE varchar(70)", "table 'rich_author': column 'slug' is"),
        ("ALTER TABLE rich_author ADD more integer", "table 'rich_author': column 'more' is not exp"),
        ('ALTER TABLE "Mixed Case" DROP code', "table 'Mixed Case': column 'code' is missing"),
        ("ALTER TABLE rich_author ALTER rank DROP NOT NULL", "table 'rich_author': column 'rank' is"),
        ("ALTER TABLE rich_author DROP CONSTRAINT positive_score", "'positive_score' is missing"),
        ("DROP INDEX by_birth", "index 'by_birth' is missing"),
        ("DROP INDEX by_birth; CREATE INDEX by_birth ON rich_author (born)", "index 'by_birth': it is"),
        ("COMMENT ON COLUMN rich_author.name IS 'x'", "table 'rich_author': it is"),
        ("ALTER SEQUENCE own INCREMENT 3", "sequence 'own': it is"),
        ("ALTER TABLE \"Mixed Case\" ENABLE TRIGGER off", "trigger 'Mixed Case.off': it is"),
        ("DROP TRIGGER late ON rich_author", "trigger 'rich_author.late' is missing"),
        ("ALTER TYPE mood ADD VALUE 'glad' BEFORE 'sad'", "type 'mood': it is"),
        ("ALTER DOMAIN positive DROP NOT NULL", "domain 'positive': it is"),
        ("CREATE OR REPLACE FUNCTION plus(x integer DEFAULT 1) RETURNS integer LANGUAGE sql"
         " AS 'SELECT x + 2'", "function 'plus(x integer)': it is"),
        ("CREATE OR REPLACE VIEW z_names AS SELECT id, name AS n FROM rich_author", "view 'z_names': it"),
        ("CREATE FUNCTION plus(x text) RETURNS text LANGUAGE sql AS 'SELECT x'",
         "function 'plus(x text)' is not expected"),
        ("ALTER TABLE unlogged SET LOGGED", "table 'unlogged': it is"),
        ("CREATE OPERATOR === (FUNCTION = int4eq, LEFTARG = integer, RIGHTARG = integer)",
         "object 'operator ===(integer,integer)' is not expected"),
    ],
)  # fmt: skip
def test_differences_are_named(
    server: Schemas, rich_schema: str, change: str, difference: str
) -> None:
    copy = server.copy(rich_schema)
    server.execute(copy, change)
    (found,) = server.read(copy).differences(server.read(rich_schema))
    assert difference in found
    assert server.read(copy).fingerprint != server.read(rich_schema).fingerprint


def test_what_was_begun_is_finished(server: Schemas) -> None:
    one, two = server.create(), server.create()
    for statement in (
        "CREATE TABLE one (id integer PRIMARY KEY, word text)",
        "CREATE INDEX by_word ON one (word)",
        "CREATE TABLE two (one_id integer REFERENCES one)",
    ):
        server.execute(one, statement)
    server.execute(two, "CREATE TABLE one (id integer PRIMARY KEY, word text)")
    server.execute(two, "INSERT INTO one VALUES (1, 'x')")
    server.build(two, server.read(one))
    assert server.read(two).differences(server.read(one)) == []
    assert server.execute(two, "SELECT word FROM one") == [("x",)]


def test_nothing_is_left_of_a_build_that_fails(server: Schemas, rich_schema: str) -> None:
    definitions = {
        **server.read(rich_schema).definitions,
        "zz": 'CREATE VIEW "zz" AS SELECT nothing',
    }
    target = server.create()
    with pytest.raises(ProgrammingError, match="nothing"):
        server.build(target, SchemaSnapshot(definitions))
    assert server.read(target).is_empty


def test_objects_that_cannot_be_copied_are_refused(server: Schemas) -> None:
    schema = server.create()
    server.execute(schema, "CREATE TABLE a (b integer)")
    server.execute(
        schema, "CREATE OPERATOR === (FUNCTION = int4eq, LEFTARG = integer, RIGHTARG = integer)"
    )
    target = server.create()
    with pytest.raises(RehearsalFailed, match="operator ==="):
        server.build(target, server.read(schema))
    assert server.read(target).is_empty


def test_rows_and_next_values_are_counted_and_do_not_count(server: Schemas) -> None:
    one, two = server.create(), server.create()
    for schema in (one, two):
        server.execute(schema, "CREATE TABLE t (id bigint GENERATED BY DEFAULT AS IDENTITY)")
        server.execute(schema, "CREATE TABLE s (id serial, other serial)")
    server.execute(one, "INSERT INTO t DEFAULT VALUES")
    server.execute(one, "SELECT setval('t_id_seq', 41)")
    assert server.read(one).counters == {"t": 42}
    server.execute(one, "INSERT INTO s DEFAULT VALUES")
    server.execute(one, "SELECT setval('s_other_seq', 99)")
    assert server.read(one).counters == {"t": 42, "s": 2}
    assert server.read(two).counters == {}
    assert server.read(one) == server.read(two)


def test_tables_of_the_library_and_objects_of_extensions_are_left_out(server: Schemas) -> None:
    schema = server.create()
    server.execute(schema, "CREATE TABLE t (id integer)")
    before = server.read(schema)
    server.execute(schema, f"CREATE TABLE {OWN_PREFIX}1 (id bigserial PRIMARY KEY)")
    server.execute(schema, f"CREATE INDEX by_id ON {OWN_PREFIX}1 (id)")
    server.execute(
        schema,
        f"CREATE FUNCTION {OWN_PREFIX}f() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RETURN NULL; END $$",
    )
    server.execute(
        schema,
        f"CREATE TRIGGER {OWN_PREFIX}t AFTER INSERT ON t FOR EACH ROW"
        f" EXECUTE FUNCTION {OWN_PREFIX}f()",
    )
    server.execute(schema, f"CREATE EXTENSION unaccent SCHEMA {quoted(schema)}")
    assert server.read(schema) == before


def test_a_copy_does_not_make_ids_of_another_shard(server: Schemas) -> None:
    """Functions that generate timestamped ids contain the number of their shard."""
    shards = [server.create() for _ in range(2)]
    for number, schema in enumerate(shards):
        server.execute(schema, "CREATE TABLE photo (id bigint PRIMARY KEY)")
        for statement in (
            timestamps_postgresql.create_function(schema, number),
            *timestamps_postgresql.create_sequence(schema, "photo", "id"),
            timestamps_postgresql.set_default(schema, "photo", "id"),
        ):
            server.execute(schema, statement)
    assert server.read(shards[0]) == server.read(shards[1])
    copy = server.copy(shards[1])
    assert server.read(copy) == server.read(shards[1])
    with pytest.raises(DatabaseError, match="null value"):
        server.execute(copy, "INSERT INTO photo DEFAULT VALUES")
    server.execute(copy, timestamps_postgresql.create_function(copy, 2))
    server.execute(copy, "INSERT INTO photo DEFAULT VALUES")
    assert server.read(copy) == server.read(shards[1])


def test_an_index_that_was_not_finished_is_seen(server: Schemas) -> None:
    one, two = server.create(), server.create()
    for schema in (one, two):
        server.execute(schema, "CREATE TABLE t (id integer)")
    server.execute(one, "CREATE UNIQUE INDEX i ON t (id)")
    server.execute(two, "INSERT INTO t VALUES (1), (1)")
    with pytest.raises(DatabaseError):
        server.execute(two, "CREATE UNIQUE INDEX CONCURRENTLY i ON t (id)")
    (difference,) = server.read(two).differences(server.read(one))
    assert "not valid" in difference


def test_a_schema_that_does_not_exist(server: Schemas) -> None:
    with pytest.raises(DatabaseError) as raised:
        server.read("nowhere")
    assert sqlstate_of(raised.value) == "3F000"


def test_two_queries_however_many_schemas_there_are(server: Schemas, rich_schema: str) -> None:
    empty = server.create()
    for number in range(300):
        server.execute("", f"CREATE SCHEMA many_{number}; CREATE TABLE many_{number}.t (a integer)")
    with queries(server, rich_schema) as captured:
        server.read(rich_schema)
    assert len(captured) == 2
    with queries(server, empty) as captured:
        server.read(empty)
    assert len(captured) == 1
    for query in captured.captured_queries:
        plan = explain(server, empty, query["sql"])
        assert "Seq Scan on pg_depend" not in plan


def explain(server: Schemas, schema: str, sql: str) -> str:
    return "\n".join(line for (line,) in server.execute(schema, f"EXPLAIN {sql}"))


# ##### Digests #####


def record(server: Schemas, schema: str, *migrations: tuple[str, str]) -> None:
    recorder = MigrationRecorder(server.connection(schema))
    recorder.ensure_schema()
    for app, name in migrations:
        server.execute(
            schema,
            "INSERT INTO django_migrations (app, name, applied) VALUES (%s, %s, now())",
            [app, name],
        )


def digests(server: Schemas, *schemas: str) -> dict[str, str | None]:
    with server.server.cursor() as cursor:
        return snapshot.digests(cursor, schemas)


def test_the_server_computes_the_same_digests(server: Schemas) -> None:
    rows = [("photos", f"{number:04d}_é😀") for number in range(40)]
    marker = ("sharded_orm", "run 1 step 2")
    by_schema = {
        server.create(): rows,
        server.create(): rows[:1],
        server.create(): [],
        server.create(): [marker, ("sharded_orm", "0001_initial"), ("sharded_orm", "runner")],
        server.create('D "igest" 50%s'): rows[3:],
    }
    for schema, migrations in by_schema.items():
        record(server, schema, *migrations)
    expected = {schema: applied_digest(rows) for schema, rows in by_schema.items()}
    assert digests(server, *by_schema) == expected
    assert len(set(expected.values())) == 5


def test_schemas_without_migrations_and_schemas_that_are_missing(server: Schemas) -> None:
    one, two, bare = server.create(), server.create(), server.create()
    for schema in (one, two):
        record(server, schema, ("a", schema))
    assert digests(server, one, "nowhere", bare, two) == {
        one: applied_digest([("a", one)]),
        "nowhere": None,
        bare: "",
        two: applied_digest([("a", two)]),
    }
    assert digests(server, "nowhere") == {"nowhere": None}
    assert digests(server, bare) == {bare: ""}
    assert digests(server) == {}


def test_one_query_for_500_schemas(server: Schemas, monkeypatch: Any) -> None:
    monkeypatch.setattr(snapshot, "BATCH", 2)
    schemas = [server.create() for _ in range(4)]
    for schema in schemas:
        record(server, schema)
    with CaptureQueriesContext(server.server) as captured:
        digests(server, *schemas)
    assert len(captured) == 2


# ##### Schemas #####


@pytest.mark.parametrize("name", ["rehearsal", *(f"{name} R" for name in NASTY)])
def test_an_empty_schema_is_created_and_dropped(server: Schemas, name: str) -> None:
    with server.server.cursor() as cursor:
        assert name not in snapshot.names(cursor)
        for _ in range(2):
            snapshot.create_schema(cursor, name)
            assert name in snapshot.names(cursor)
            assert server.read(name).is_empty
            server.execute(name, 'CREATE TABLE "T %" (id serial)')
            server.execute(name, 'CREATE VIEW v AS SELECT id FROM "T %"')
        server.execute(name, 'INSERT INTO "T %" DEFAULT VALUES')
        with pytest.raises(RehearsalFailed, match="has rows"):
            snapshot.create_schema(cursor, name)
        assert server.execute(name, 'SELECT id FROM "T %"') == [(1,)]
        for _ in range(2):
            snapshot.drop_schema(cursor, name)
            assert name not in snapshot.names(cursor)


def test_names_are_those_of_users(server: Schemas) -> None:
    with server.server.cursor() as cursor:
        names = snapshot.names(cursor)
    assert {"public", "extensions"} <= names
    assert not names & {"pg_catalog", "pg_toast", "information_schema"}
