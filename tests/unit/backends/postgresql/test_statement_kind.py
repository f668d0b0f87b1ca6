from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharded_orm.backends.postgresql.statement_kind import (
    PostgreSQLKind,
    begins_anew,
    classify,
    is_repeatable,
    is_several,
    makes_table,
    reason,
    resets_path,
)

CASES = {
    PostgreSQLKind.READ: [
        "SELECT 1",
        'select "a", %s from "t" where "b" = %s',
        "  (SELECT 1) UNION (SELECT 2)",
        "/* app:photos */ SELECT 1",
        "/* a /* nested 'quote */ ; SET x */ SELECT 1",
        "-- why; SET x = 1\nSELECT 1",
        "-- don't\nSELECT 1 -- can't",
        "SELECT 1;",
        "SELECT 1 ; \n",
        ";SELECT 1",
        "SELECT 'a;b', \"x;y\", E'it\\'s; SET x = 1'",
        "SELECT 'back\\', 1",
        "SELECT $$; COMMIT; $$, $a$ $$ ; SET x = 1 $$ $a$, $A$ $a$; SET x = 1; $A$",
        "SELECT 'it''s; COMMIT'",
        'SELECT "set", "search_path", "into" FROM "temp"',
        "SELECT search_path, temporary FROM t WHERE advisory = 1",
        "SHOW search_path",
        "SHOW ALL",
        "VALUES (1)",
        "TABLE t",
        "SELECT pg_advisory_xact_lock(1), pg_try_advisory_xact_lock_shared(1, 2)",
        "SELECT current_setting('search_path')",
        "SELECT $1, a$b$c FROM t",
        "SELECT 'set_config(', 'lastval()', 'nextval'",
        "SELECT relname FROM pg_settings, pg_temporary_things",
    ],
    PostgreSQLKind.WRITE: [
        "UPDATE t SET a = 1 WHERE b = 'x'",
        'UPDATE "t" SET "search_path" = 1',
        "DELETE FROM t",
        "SELECT * FROM t WHERE id = 1 FOR UPDATE",
        "SELECT * FROM t FOR NO KEY UPDATE SKIP LOCKED",
        "SELECT * FROM t FOR KEY SHARE",
        "SELECT * INTO u FROM t",
        "SELECT * INTO UNLOGGED u FROM t",
        "EXPLAIN SELECT 1",
        "EXPLAIN (ANALYZE, BUFFERS) INSERT INTO t VALUES (1)",
        "CREATE TABLE t (a int)",
        "CREATE TABLE t (a int DEFAULT nextval('s'))",
        'CREATE TABLE "concurrently" ("concurrently" bool, concurrently int)',
        "CREATE INDEX i ON t (a)",
        "CREATE UNIQUE INDEX i ON t (a)",
        "CREATE FUNCTION f() RETURNS int LANGUAGE sql AS $$ SELECT 1; COMMIT; $$",
        "CREATE FUNCTION f() RETURNS int LANGUAGE sql AS $$ CREATE TEMP TABLE x (); $$",
        "CREATE FUNCTION f() RETURNS int SET search_path = pg_catalog LANGUAGE sql AS 'SELECT 1'",
        "CREATE FUNCTION f() RETURNS int BEGIN ATOMIC SELECT 1; SELECT CASE WHEN a THEN 1 END; END",
        "CREATE PROCEDURE p() BEGIN ATOMIC END",
        "ALTER ROLE r SET search_path = x",
        "ALTER FUNCTION f() SET search_path FROM CURRENT",
        "ALTER TABLE t ADD COLUMN temp int",
        "ALTER TABLE t DETACH PARTITION p",
        "DROP INDEX i",
        "CREATE EXTENSION hstore SCHEMA other",
        "CREATE EXTENSION IF NOT EXISTS hstore WITH SCHEMA other CASCADE",
        "DROP EXTENSION hstore",
        "TRUNCATE t",
        "NOTIFY x, 'payload'",
        "SET LOCAL search_path TO x",
        "SET LOCAL statement_timeout = '1s'",
        "SET CONSTRAINTS ALL IMMEDIATE",
        "SET CONSTRAINTS ALL IMMEDIATE; SET CONSTRAINTS ALL DEFERRED",
        "SELECT set_config('app.tenant', %s, true)",
        "SELECT pg_catalog.set_config('search_path', 'x', is_local => TRUE)",
        "REFRESH MATERIALIZED VIEW CONCURRENTLY v",
        "LOCK TABLE t; INSERT INTO t VALUES (1)",
        "DECLARE c CURSOR FOR SELECT 1; FETCH ALL FROM c",
        "SELECT 1; SELECT 2",
        "CALL p(); CALL q()",
        "VACUUM t; SELECT 1",
        "",
        ";",
        "-- nothing",
        "/* nothing */",
    ],
    PostgreSQLKind.INSERT: [
        'INSERT INTO "t" ("a") VALUES (%s) RETURNING "id"',
        "MERGE INTO t USING s ON t.a = s.a WHEN MATCHED THEN DO NOTHING",
        "WITH x AS (SELECT 1) SELECT * FROM x",
        "WITH x AS (SELECT 1) INSERT INTO t SELECT * FROM x",
        "SELECT nextval('s'), setval('s', 5)",
        "COPY t FROM STDIN",
        "DO $$ BEGIN PERFORM 1; UPDATE t SET a = 1; END $$",
        "DO $$ BEGIN SET LOCAL x.y = 1; END $$",
        "DO 'BEGIN NULL; END'",
        "UPDATE t SET a = nextval('s')",
        "SELECT 1; INSERT INTO t VALUES (1)",
    ],
    PostgreSQLKind.SAVEPOINT: ['SAVEPOINT "s1_x1"', 'SAVEPOINT "s1_x1"  '],
    PostgreSQLKind.ROLLBACK_TO: ['ROLLBACK TO SAVEPOINT "s1_x1"'],
    PostgreSQLKind.RELEASE: ['RELEASE SAVEPOINT "s1_x1"'],
    PostgreSQLKind.SET_TRANSACTION: [
        "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE",
        "set transaction read only;",
        "/* x */ SET TRANSACTION SNAPSHOT '0003'",
    ],
    PostgreSQLKind.BARE: [
        "LOCK TABLE t",
        "LOCK t IN SHARE MODE NOWAIT",
        "PREPARE TRANSACTION 'x'",
        "DECLARE c CURSOR FOR SELECT 1",
        "DECLARE c CURSOR WITHOUT HOLD FOR SELECT 1",
    ],
    PostgreSQLKind.EXTENSION: [
        "CREATE EXTENSION hstore",
        'CREATE EXTENSION IF NOT EXISTS "uuid-ossp"',
        "-- tags\nCREATE EXTENSION hstore -- in SCHEMA x",
        "CREATE EXTENSION a; CREATE EXTENSION b",
        "CREATE EXTENSION a; CALL p()",
    ],
    PostgreSQLKind.AFFINE: [
        "SELECT lastval()",
        "SELECT currval('s')",
        "INSERT INTO t (a) VALUES (currval ('s'))",
        "SELECT pg_catalog.\"lastval\"()",
        "INSERT INTO t DEFAULT VALUES; SELECT lastval()",
    ],
    PostgreSQLKind.MAYBE_ALONE: [
        "CALL p(1)",
        "DO $$ BEGIN UPDATE t SET a = 1; COMMIT; END $$",
        "DO $$ BEGIN CALL p(); END $$",
        "do language plpgsql 'begin rollback; end'",
        "CLUSTER t USING i",
        'CLUSTER VERBOSE "t"',
        "CLUSTER (VERBOSE) t",
        "REINDEX TABLE maybe_partitioned",
        "reindex (verbose) index \"i\"",
    ],
    PostgreSQLKind.ALONE: [
        "VACUUM",
        "vacuum (analyze) t;",
        "CLUSTER",
        "CLUSTER VERBOSE",
        "REINDEX SCHEMA s",
        "REINDEX DATABASE d",
        "REINDEX TABLE CONCURRENTLY t",
        "REINDEX (CONCURRENTLY) TABLE t",
        "REINDEX INDEX CONCURRENTLY i",
        "REINDEX (VERBOSE, CONCURRENTLY) INDEX i",
        'CREATE INDEX CONCURRENTLY "i" ON "t" ("a")',
        "CREATE UNIQUE INDEX CONCURRENTLY IF NOT EXISTS i ON t (a)",
        'DROP INDEX CONCURRENTLY IF EXISTS "i"',
        "ALTER TABLE t DETACH PARTITION p CONCURRENTLY",
        "CREATE DATABASE d",
        "DROP DATABASE d WITH (FORCE)",
        "CREATE TABLESPACE t LOCATION '/x'",
        "ALTER SYSTEM SET work_mem = '1MB'",
        "COMMIT PREPARED 'x'",
        "ROLLBACK PREPARED 'x'",
        "CHECKPOINT",
        "/* c */ VACUUM",
    ],
    PostgreSQLKind.CONTROL: [
        "BEGIN",
        "START TRANSACTION ISOLATION LEVEL SERIALIZABLE",
        "COMMIT",
        "END",
        "ROLLBACK",
        "ABORT",
        "COMMIT AND CHAIN",
        "SAVEPOINT mine",
        "ROLLBACK TO mine",
        "RELEASE mine",
        "SELECT 1; COMMIT; SELECT 2",
        "INSERT INTO t VALUES ('x'); /* x */ COMMIT",
        "SELECT E'\\''; COMMIT; SELECT ''",
        "SELECT '\\'; COMMIT; SELECT 'x'",
        "-- x\rCOMMIT",
        "SELECT 1; SAVEPOINT \"s1_x1\"; SELECT 2",
        "SELECT 'unterminated; COMMIT",
        "SELECT $$unterminated; COMMIT",
        "SELECT $a$ ; COMMIT $A$",
        "SELECT 1 /* unterminated ; COMMIT",
        "SELECT 1 /* nested /* */ ; COMMIT",
        "SELECT €$$ FROM t; COMMIT; SELECT €$$",
        "CREATE FUNCTION f() RETURNS int BEGIN ATOMIC SELECT 1; END; COMMIT",
        "CREATE FUNCTION f() RETURNS int BEGIN ATOMIC SELECT 1; COMMIT",
    ],
    PostgreSQLKind.STATE: [
        "SET work_mem = '1MB'",
        "SET SESSION work_mem = '1MB'",
        "SET TIME ZONE 'UTC'",
        "SET ROLE r",
        "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY",
        "RESET work_mem",
        "DISCARD PLANS",
        "SELECT set_config('work_mem', '1MB', false)",
        "SELECT pg_catalog.\"set_config\"('work_mem', '1MB', false)",
        "SELECT set_config('work_mem', %s, %s)",
        "SELECT set_config('work_mem', %s, 'f'::bool)",
        "SELECT set_config('a.b', 'c', true), set_config('work_mem', '1MB', false)",
        "SELECT pg_advisory_lock(1)",
        "SELECT pg_try_advisory_lock_shared (1, 2)",
        "SELECT pg_advisory_unlock_all()",
        "WITH x AS (SELECT pg_advisory_lock(1)) SELECT * FROM x",
        "SELECT setseed(0.5)",
        "SELECT set_limit(0.5)",
        "SELECT dblink_connect('x')",
        "CREATE TEMPORARY TABLE t (a int)",
        "CREATE LOCAL TEMP TABLE t (a int)",
        "CREATE OR REPLACE TEMP VIEW v AS SELECT 1",
        "CREATE TEMP SEQUENCE s",
        "CREATE TABLE pg_temp.t (a int)",
        'CREATE TABLE "pg_temp"."t" (a int)',
        "CREATE TABLE pg_temp_3.t (a int)",
        "SELECT * INTO TEMP u FROM t",
        "CREATE TABLE t AS SELECT set_config('work_mem', '1MB', false)",
        "EXPLAIN ANALYZE CREATE TEMP TABLE t AS SELECT 1",
        "DECLARE c CURSOR WITH HOLD FOR SELECT 1",
        "DECLARE c INSENSITIVE NO SCROLL CURSOR WITH HOLD FOR SELECT 1",
        "PREPARE s AS SELECT 1",
        "EXECUTE s",
        "DEALLOCATE ALL",
        "LISTEN x",
        "UNLISTEN *",
        "LOAD 'x'",
        "/* hidden */ SET x.y = 1",
        "/* don't */ SET x.y = 1 -- don't",
        "SELECT 1; SET x.y = 1",
        "SELECT 1;;SET x.y = 1",
        "DO $$ BEGIN PERFORM set_config('a.b', 'c', false); END $$",
        "DO $$ BEGIN CREATE TEMP TABLE t (); END $$",
        "DO $$ BEGIN SET work_mem = '1MB'; END $$",
        "something new",
        "SELEKT 1",
        "@",
        "'text'",
    ],
    PostgreSQLKind.PATH: [
        "SET search_path TO x",
        "set session Search_Path = x, public",
        'SET "search_path" TO x',
        "RESET search_path",
        "RESET ALL",
        "DISCARD ALL",
        "SET SCHEMA 'x'",
        "SELECT set_config('search_path', 'x', false)",
        "SELECT set_config(%s, 'x', false)",
        "SELECT set_config(name, 'x', false) FROM t",
        "SELECT set_config('search' || '_path', 'x', false) -- search_path",
        "UPDATE pg_settings SET setting = 'x' WHERE name = 'search_path'",
        'UPDATE "pg_catalog"."pg_settings" SET setting = \'x\'',
        "SELECT 1; SET search_path TO x",
        'SELECT U&"set\\005fconfig"(\'search_path\', \'x\', false)',
        "DO $$ BEGIN PERFORM set_config('search_path', 'x', false); END $$",
        "DO $$ BEGIN SET search_path TO x; END $$",
        "DO $$ BEGIN CREATE TEMP TABLE t (); COMMIT; END $$",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("sql", "kind"), [(sql, kind) for kind, cases in CASES.items() for sql in cases]
)
def test_kinds(sql: str, kind: PostgreSQLKind) -> None:
    assert classify(sql) is kind


@pytest.mark.parametrize("kind", CASES)
def test_long_statements_are_read_the_same_way(kind: PostgreSQLKind) -> None:
    for sql in CASES[kind]:
        assert classify(f"{' ' * 5000}{sql}") is kind, sql


@given(st.text(st.sampled_from("'\";aEe\\ $"), max_size=12))
def test_quotes_of_standard_sql_end_where_all_others_do(text: str) -> None:
    """Texts with a comment are read in another way, and mean the same."""
    for sql in (f"SELECT {text} COMMIT", f"SELECT 'x'{text}; COMMIT"):
        assert classify(sql) is classify(f"/**/{sql}"), sql


def test_a_bulk_insert_is_an_insert() -> None:
    sql = 'INSERT INTO "t" ("a", "b") VALUES ' + ", ".join(["(%s, %s)"] * 5000)
    assert classify(sql) is PostgreSQLKind.INSERT


@pytest.mark.parametrize(
    ("sql", "why"),
    [
        ("SET app.password = 'secret'", "SET"),
        ("SELECT pg_advisory_lock(1)", "pg_advisory_lock"),
        ("SELECT set_config('app.password', 'secret', false)", "set_config"),
        ("SELECT 'secret'; COMMIT", "several statements"),
        ("SELECT 'secret", "text with an open quote"),
        ("listen x", "LISTEN"),
        ("'secret'", "?"),
    ],
)
def test_the_reason_tells_no_values(sql: str, why: str) -> None:
    assert reason(sql) == why


def test_texts_of_several_statements() -> None:
    assert is_several("SELECT 1; SELECT 2")
    assert is_several("SELECT 'open; SELECT 2")
    for one in ("SELECT 1", "SELECT 1;", ";SELECT 1 ;\n", "SELECT ';'", "SELECT 1 -- ; SELECT 2"):
        assert not is_several(one), one


def test_chains_of_transactions() -> None:
    assert begins_anew("COMMIT AND CHAIN")
    assert begins_anew("rollback work and  chain")
    assert not begins_anew("COMMIT AND NO CHAIN")
    assert not begins_anew("COMMIT /* AND CHAIN */")


def test_statements_that_give_back_the_default_path() -> None:
    for sql in ("RESET ALL", "DISCARD ALL", "RESET search_path", "SET search_path TO DEFAULT"):
        assert resets_path(sql), sql
    assert not resets_path("SET search_path TO x")


@pytest.mark.parametrize(
    ("sql", "may_run_twice"),
    [
        ('SELECT "a" FROM "t" WHERE ("b" IN (1, 2) AND "c" = ANY(%s))', True),
        ('SELECT COUNT(*) AS "n", lower("x") FROM (SELECT 1) s', True),
        ("SELECT 'f(x)'", True),
        ("SELECT my_function(1)", False),
        ('SELECT "my_function"(1)', False),
        ("SELECT pg_notify('a', 'b')", False),
        ("SELECT lo_create (0)", False),
        ("SELECT pg_catalog.lower('A')", True),
        ("SELECT take$lower(1)", False),
        ("SELECT mine.lower('A')", False),
        ('SELECT "take" (1)', False),
        ("SELECT take /* lower */ (1)", False),
        ("SELECT take -- lower\n (1)", False),
        ("SELECT 'lower(' , lower( take (1))", False),
        ("SELECT lower(a) -- take(1)", True),
        (f"SELECT {'x' * 99}lower(1)", False),
        ("SELECT mine." + " " * 99 + "lower(1)", False),
        ("SELECT a FROM t WHERE id IN (" + ", ".join(["%s"] * 1000) + ")", True),
        # The names of a query's columns.
        (
            'SELECT c0, s FROM ((SELECT "a", 0 FROM "x"."t") UNION ALL (SELECT 1, 2)) AS u (c0, s)',
            True,
        ),
        ("SELECT * FROM (WITH v (c0, s) AS (SELECT 1, 2) SELECT * FROM v) u", True),
        ("SELECT * FROM (SELECT 1) AS u (c0) WHERE my_function(c0)", False),
        ("SELECT DISTINCT ON (a) my_function(b) AS n FROM t", False),
        ("SELECT alias my_function(1)", False),
        ("SELECT with_(1)", False),
        ('SELECT a AS"b", my_function(1)', False),
        ("SELECT * FROM mine.take(1) AS t (a)", False),
    ],
)
def test_reads_that_call_functions_run_once(sql: str, may_run_twice: bool) -> None:
    assert classify(sql) is PostgreSQLKind.READ
    assert is_repeatable(sql) is may_run_twice


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("WITH w AS (SELECT 1 AS a) SELECT a INTO other FROM w", True),
        ("with w as (insert into a values (1) returning b) select b into c from w", True),
        ("WITH w AS (SELECT 1 AS a) INSERT  INTO other SELECT a FROM w", False),
        (
            "WITH w AS (SELECT 1 AS a) MERGE INTO other USING w ON true WHEN MATCHED THEN DELETE",
            False,
        ),
        ("WITH w AS (SELECT ' INTO ' AS a) DELETE FROM b", False),
    ],
)
def test_a_statement_that_makes_a_table(sql: str, expected: bool) -> None:
    assert makes_table(sql) is expected
