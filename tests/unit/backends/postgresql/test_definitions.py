"""Definitions that are composed from the rows of the catalog, and the order in which they are created."""

from __future__ import annotations

import pytest

from sharded_orm.backends.postgresql.catalog import CatalogRow
from sharded_orm.backends.postgresql.creation_order import statements, unknown
from sharded_orm.backends.postgresql.definitions import compose, in_schema
from sharded_orm.backends.snapshot import SchemaSnapshot


def function(body: str, schema: str = "shard_1", name: str = "f()") -> CatalogRow:
    text = f"CREATE OR REPLACE FUNCTION {schema}.{name}\n LANGUAGE sql\nAS $function$ {body} $function$\n"
    return CatalogRow("function", name, text, schema)


def only(snapshot: SchemaSnapshot) -> str:
    (definition,) = snapshot.definitions.values()
    return definition


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("'a\n,\n  b'::text", r"E'a\n,\n  b'::text"),
        (r"E'a\\b' || 'c'" + "\n", r"E'a\\b' || 'c'" + "\n"),
        ("E'a\\\\\n''b'", r"E'a\\\n''b'"),
        ("'a\\\n'", r"E'a\\\n'"),
        ('"a\n)b" > 3', r'U&"a\000a)b" > 3'),
        ("\"it's\" = 'a\n'", "\"it's\" = E'a\\n'"),
    ],
)
def test_there_are_no_line_ends_inside_of_names_and_texts(text: str, expected: str) -> None:
    rows = [CatalogRow("table", "t", "", None), CatalogRow("column", "t", text, "1")]
    assert only(compose(rows)) == f'CREATE TABLE "t" (\n  {expected}\n)'


def test_pieces_of_tables_come_in_any_order() -> None:
    rows = [
        CatalogRow("addition", "t", "ALTER TABLE t ENABLE ROW LEVEL SECURITY", "2"),
        CatalogRow("constraint", "t", 'CONSTRAINT "b" PRIMARY KEY (id)', "b"),
        CatalogRow("column", "t", '"z" text', "00010"),
        CatalogRow("column", "t", '"id" integer', "00002"),
        CatalogRow("table", "t", " WITH (fillfactor='70')", None),
        CatalogRow("counter", "t", "42", None),
    ]
    for ordered in (rows, rows[::-1]):
        snapshot = compose(ordered)
        assert only(snapshot) == (
            'CREATE TABLE "t" (\n  "id" integer,\n  "z" text,\n  CONSTRAINT "b" PRIMARY KEY (id)\n)'
            " WITH (fillfactor='70');\nALTER TABLE t ENABLE ROW LEVEL SECURITY"
        )
        assert snapshot.counters == {"t": 42}


@pytest.mark.parametrize(
    ("schema", "body", "expected"),
    [
        ("shard_1", "SELECT shard_1.f(), shard_10.g(), my_shard_1.h()",
         'SELECT "$schema".f(), shard_10.g(), my_shard_1.h()'),
        ("shard_1", 'SELECT "shard_1" . f()', 'SELECT "$schema" . f()'),
        ("shard_1", "SELECT 'shard_1'", "SELECT 'shard_1'"),
        ('"Shard 1"', 'SELECT "Shard 1".f(), Shard 1.g()', 'SELECT "$schema".f(), Shard 1.g()'),
        ('"S""1"', 'SELECT "S""1".f(), "S1".f()', 'SELECT "$schema".f(), "S1".f()'),
    ],
)  # fmt: skip
def test_a_function_names_a_placeholder_instead_of_its_own_schema(
    schema: str, body: str, expected: str
) -> None:
    snapshot = compose([function(body, schema)])
    assert f" {expected} " in only(snapshot)
    assert list(snapshot.definitions) == ["function f()"]
    assert '"other ""1""".f()' in in_schema(
        only(compose([function(f"SELECT {schema}.f()", schema)])), 'other "1"'
    )


def test_the_path_of_a_function_names_a_placeholder() -> None:
    row = function("SELECT 1")
    text = row.text.replace(" LANGUAGE", " SET search_path TO 'shard_1', 'pg_temp'\n LANGUAGE")
    definition = only(compose([row._replace(text=text)]))
    assert "SET search_path TO '$schema', 'pg_temp'" in definition
    assert "SET search_path TO 'it''s', 'pg_temp'" in in_schema(definition, "it's")


def view(name: str, query: str) -> tuple[str, str]:
    return name, f'CREATE VIEW "{name}" AS\n SELECT {query}'


def test_views_come_after_those_that_they_read() -> None:
    definitions = dict(
        [view("a", "b.x FROM b"), view("b", 'x FROM "c C"'), view("c C", "1 AS x"), view("d", "1")]
    )
    created = [text.split('"')[1] for text in statements(definitions, definitions, "s")]
    assert created == ["c C", "b", "a", "d"]


def test_names_that_only_seem_to_need_each_other() -> None:
    definitions = dict([view("a", "1 AS b"), view("b", "a.b FROM a")])
    assert len(list(statements(definitions, definitions, "s"))) == 2


def test_foreign_keys_come_after_all_tables_and_indexes() -> None:
    definitions = {
        "a": 'CREATE TABLE "a" (\n  "b" integer,\n  CONSTRAINT "f" FOREIGN KEY (b) REFERENCES z(b)\n)',
        "i": "CREATE UNIQUE INDEX i ON z USING btree (b)",
        "m": "CREATE UNIQUE INDEX m ON v USING btree (b)",
        "v": 'CREATE MATERIALIZED VIEW "v" AS\n SELECT 1 AS b',
        "z": 'CREATE TABLE "z" (\n  "b" integer\n);\nCOMMENT ON TABLE "z" IS \'x\'',
    }
    assert list(statements(definitions, definitions, "s")) == [
        'CREATE TABLE "a" (\n  "b" integer\n)',
        'CREATE TABLE "z" (\n  "b" integer\n)',
        definitions["i"],
        'ALTER TABLE "a" ADD CONSTRAINT "f" FOREIGN KEY (b) REFERENCES z(b)',
        definitions["v"],
        definitions["m"],
        "COMMENT ON TABLE \"z\" IS 'x'",
    ]
    assert unknown({**definitions, "aggregate a(integer)": "aggregate a(integer)"}) == [
        "aggregate a(integer)"
    ]
