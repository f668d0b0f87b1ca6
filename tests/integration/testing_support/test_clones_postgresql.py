"""A test shard on PostgreSQL has all that the template has, on its node and on another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from sharded_orm import runtime
from sharded_orm.exceptions import InvalidConfiguration
from sharded_orm.ids.timestamps_postgresql import create_function, function_name
from sharded_orm.testing.clones_postgresql import PostgreSQLCloner
from sharded_orm.testing.names import TestNames
from sharded_orm.topology.model import Shard
from tests.services.postgresql import DATABASE, Address
from tests.unit.backends.group.conftest import GROUP, using_nodes

NAMES = TestNames(GROUP, base="clones")

TABLES = """
CREATE TYPE mood AS ENUM ('sad', 'happy');
CREATE TABLE person (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  name text, louder text GENERATED ALWAYS AS (upper(name)) STORED,
  feels mood, felt mood[],
  chief bigint REFERENCES person);
CREATE TABLE a_letter (
  id serial PRIMARY KEY, person_id bigint NOT NULL REFERENCES person, "of ""them"", odd" jsonb);
CREATE TABLE one (id int PRIMARY KEY, two int);
CREATE TABLE two (id int PRIMARY KEY, one int REFERENCES one DEFERRABLE INITIALLY DEFERRED);
ALTER TABLE one ADD FOREIGN KEY (two) REFERENCES two DEFERRABLE INITIALLY DEFERRED;
CREATE TABLE measured (at int, value bytea) PARTITION BY RANGE (at);
CREATE TABLE measured_early PARTITION OF measured FOR VALUES FROM (0) TO (10);
CREATE TABLE measured_late PARTITION OF measured FOR VALUES FROM (10) TO (20);
CREATE TABLE guarded (id int PRIMARY KEY);
CREATE MATERIALIZED VIEW names AS SELECT name FROM person;
"""
ROWS = r"""
INSERT INTO person (name, feels, felt) VALUES ('ä\n''b''', 'sad', '{happy,sad}'), (NULL, NULL, NULL);
INSERT INTO person (name, chief) VALUES ('third', 2);
DELETE FROM person WHERE name IS NULL AND id <> 2;
INSERT INTO a_letter (person_id, "of ""them"", odd") VALUES (1, '{"a": [1, "tab\t"]}');
BEGIN; INSERT INTO one VALUES (1, 1); INSERT INTO two VALUES (1, 1); COMMIT;
INSERT INTO measured VALUES (5, '\x00ff'), (15, NULL);
INSERT INTO guarded VALUES (1);
REFRESH MATERIALIZED VIEW names;
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
  $$ BEGIN RAISE 'no %', TG_OP; END $$;
CREATE TRIGGER guard BEFORE INSERT OR DELETE ON guarded FOR EACH ROW EXECUTE FUNCTION refuse();
"""
READ = ("person", "a_letter", "one", "two", "measured", "ONLY measured_late", "guarded", "names")

Execute = Callable[..., list[Any]]


@pytest.fixture
def nodes(
    postgresql_nodes: list[Address], django_db_blocker: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Address]]:
    addresses = dict(zip(runtime.config().topology.nodes, postgresql_nodes, strict=False))
    settings = {name: address.node() for name, address in addresses.items()}
    with django_db_blocker.unblock(), using_nodes(settings, monkeypatch):
        yield addresses


@pytest.fixture
def execute(nodes: dict[str, Address]) -> Execute:
    """Runs statements in the schema of a shard."""

    def in_schema(shard: Shard, sql: str) -> list[Any]:
        address = nodes[shard.node].psycopg(DATABASE)
        with psycopg.connect(**address, autocommit=True) as connection:
            connection.execute(f'SET search_path TO "{shard.schema}"')
            done = connection.execute(sql)
            return done.fetchall() if done.description else []

    return in_schema


def shard_of(number: int) -> Shard:
    return NAMES.renamed(runtime.config().topology.groups[GROUP]).shard(number)


@pytest.fixture
def template(nodes: dict[str, Address]) -> Shard:
    return NAMES.template(runtime.config().topology.groups[GROUP])


@pytest.fixture
def cloner(
    nodes: dict[str, Address], template: Shard, execute: Execute
) -> Iterator[PostgreSQLCloner]:
    cloner = PostgreSQLCloner()
    cloner.create_template(template, keep=False)
    execute(template, TABLES)
    execute(template, ROWS)
    cloner.load_template(template)
    yield cloner
    cloner.drop([template, *map(shard_of, range(16))])


def rows_of(execute: Execute, shard: Shard) -> dict[str, list[Any]]:
    return {table: sorted(execute(shard, f"SELECT * FROM {table}"), key=repr) for table in READ}


# Of these shards, one is on the node of the template.
SHARDS = pytest.mark.parametrize("number", [0, 8])


def test_the_shards_are_on_two_nodes(nodes: dict[str, Address], template: Shard) -> None:
    assert shard_of(0).node == template.node != shard_of(8).node


@SHARDS
def test_a_clone_has_the_rows(
    cloner: PostgreSQLCloner, execute: Execute, template: Shard, number: int
) -> None:
    expected = rows_of(execute, template)
    assert all(expected.values())
    cloner.clone(shard_of(number), keep=False)
    assert rows_of(execute, shard_of(number)) == expected


@SHARDS
def test_sequences_go_on(cloner: PostgreSQLCloner, execute: Execute, number: int) -> None:
    cloner.clone(shard_of(number), keep=False)
    for expected in (4, 5):
        new = "INSERT INTO person (name) VALUES ('new') RETURNING id"
        assert execute(shard_of(number), new) == [(expected,)]
    cloner.restore(shard_of(number))
    cloner.reset_sequences([shard_of(number)])
    assert execute(shard_of(number), new) == [(4,)]
    assert execute(shard_of(number), "SELECT nextval('a_letter_id_seq')") == [(2,)]


@SHARDS
def test_restored_rows(
    cloner: PostgreSQLCloner, execute: Execute, template: Shard, number: int
) -> None:
    shard, expected = shard_of(number), rows_of(execute, template)
    cloner.clone(shard, keep=False)
    execute(
        shard,
        "UPDATE person SET name = 'changed'; INSERT INTO measured VALUES (11, 'x');"
        " INSERT INTO a_letter (person_id) SELECT id FROM person;"
        " UPDATE guarded SET id = 2; DELETE FROM measured WHERE at = 5",
    )
    cloner.restore(shard)
    assert rows_of(execute, shard) == expected
    # The trigger works again.
    with pytest.raises(psycopg.errors.RaiseException, match="no INSERT"):
        execute(shard, "INSERT INTO guarded VALUES (3)")


@SHARDS
def test_an_empty_shard_is_filled_again(
    cloner: PostgreSQLCloner, execute: Execute, template: Shard, number: int
) -> None:
    shard = shard_of(number)
    cloner.clone(shard, keep=False)
    execute(shard, "TRUNCATE person, a_letter, one, two, measured, guarded")
    cloner.restore(shard)
    assert rows_of(execute, shard) == rows_of(execute, template)


def test_kept_shards(cloner: PostgreSQLCloner, execute: Execute, template: Shard) -> None:
    shard = shard_of(0)
    cloner.clone(shard, keep=True)
    execute(shard, "UPDATE person SET name = 'changed'")
    (before,) = execute(shard, "SELECT 'person'::regclass::oid")
    cloner.clone(shard, keep=True)
    assert rows_of(execute, shard) == rows_of(execute, template)
    assert execute(shard, "SELECT 'person'::regclass::oid") == [before]
    execute(shard, "ALTER TABLE two ADD COLUMN other int")
    cloner.clone(shard, keep=True)
    assert rows_of(execute, shard) == rows_of(execute, template)


def test_a_function_of_ids_has_the_number_of_its_shard(
    cloner: PostgreSQLCloner, execute: Execute, template: Shard
) -> None:
    execute(template, create_function(template.schema, 0))
    cloner.load_template(template)
    cloner.clone(shard_of(5), keep=False)
    body = f"SELECT prosrc FROM pg_proc WHERE oid = '{function_name()}'::regproc"
    assert [("shard CONSTANT bigint := 5;" in text) for (text,) in execute(shard_of(5), body)] == [
        True
    ]


def test_a_template_without_tables(
    nodes: dict[str, Address], template: Shard, execute: Execute
) -> None:
    cloner = PostgreSQLCloner()
    cloner.create_template(template, keep=False)
    cloner.load_template(template)
    cloner.clone(shard_of(0), keep=False)
    cloner.restore(shard_of(0))
    cloner.reset_sequences([shard_of(0)])
    assert execute(shard_of(0), "SELECT current_schema()") == [(shard_of(0).schema,)]
    cloner.drop([template, shard_of(0), shard_of(1)])
    assert execute(shard_of(0), "SELECT current_schema()") == [(None,)]


def test_a_name_that_the_server_would_cut_off(nodes: dict[str, Address]) -> None:
    configured = runtime.config().topology.groups[GROUP]
    named = TestNames(GROUP, base="x" * 58).renamed(configured)
    with pytest.raises(InvalidConfiguration, match="more than 63 bytes"):
        PostgreSQLCloner().clone(named.shard(0), keep=False)
