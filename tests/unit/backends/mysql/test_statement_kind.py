from __future__ import annotations

import pytest

from sharded_orm.backends.mysql.statement_kind import (
    StatementKind,
    calls_stored_function,
    classify,
    reason,
)

CASES = {
    StatementKind.READ: [
        "SELECT 1",
        "select `a`, %s from `t` where `b` = %s",
        "  (SELECT 1) UNION (SELECT 2)",
        "/* app:photos */ SELECT 1",
        "-- why\nSELECT 1",
        "# why\nSELECT 1",
        "SELECT 1;",
        "SELECT 1 ; \n",
        "SELECT @@sql_mode, @@session.tx_isolation",
        "SELECT 'a;b', \"x@y\", `odd;name@` FROM t -- ; USE other",
        "SELECT '@a' /* @b := 1; */",
        "SELECT is_locked, last_name, warnings FROM t",
        "SHOW TABLES",
        "EXPLAIN SELECT 1",
        "DESCRIBE t",
        "SELECT DATABASE(), CONNECTION_ID()",
        "SELECT SLEEP(1)",
        b"SELECT 1",
    ],
    StatementKind.WRITE: [
        "INSERT INTO t (a) VALUES (%s) RETURNING id",
        "UPDATE t SET a = '@@x' WHERE b = 1",
        "DELETE FROM t",
        "REPLACE INTO t VALUES (1)",
        "UPDATE seq SET id = LAST_INSERT_ID(id + 1)",
        "SELECT * FROM t WHERE id = 1 FOR UPDATE",
        "SELECT * FROM t LOCK IN SHARE MODE",
        "SELECT NEXTVAL(s)",
        "WITH x AS (SELECT 1) SELECT * FROM x",
        "ANALYZE FORMAT=JSON SELECT 1",
        "EXPLAIN ANALYZE DELETE t FROM t, u",
        "LOAD DATA INFILE 'x' INTO TABLE t",
        "DO SLEEP(0)",
        "KILL 5",
    ],
    StatementKind.IMPLICIT: [
        "CREATE TABLE t (a int COMMENT 'x@y')",
        "create database d",
        "DROP DATABASE d",
        "ALTER TABLE t ADD COLUMN a int",
        "RENAME TABLE a TO b",
        "TRUNCATE `t`;",
        "ANALYZE TABLE t",
        "CREATE USER 'a'@'%'",
        "CREATE DEFINER=`root`@`localhost` VIEW v AS SELECT 1",
        "GRANT ALL ON *.* TO a@localhost",
        "SELECT @@autocommit",
        "SHOW VARIABLES LIKE 'autocommit'",
        "savepoint `s1_x1`",
        "SAVEPOINT mine",
        "ROLLBACK TO mine",
        "rollback work to savepoint mine",
        "RELEASE SAVEPOINT mine",
    ],
    StatementKind.AFFINE: [
        "SELECT LAST_INSERT_ID()",
        "INSERT INTO t (a) VALUES (last_insert_id( ))",
        "SELECT FOUND_ROWS()",
        "SELECT ROW_COUNT ()",
        "SHOW WARNINGS",
        "SHOW COUNT(*) ERRORS",
        "SELECT @@last_insert_id",
        "SELECT @@SESSION.identity",
        "SELECT LASTVAL(s)",
    ],
    StatementKind.SAVEPOINT: ["SAVEPOINT `s1_x1`", "SAVEPOINT `s1_x1`  "],
    StatementKind.ROLLBACK_TO: ["ROLLBACK TO SAVEPOINT `s1_x1`"],
    StatementKind.RELEASE: ["RELEASE SAVEPOINT `s1_x1`"],
    StatementKind.CHECKS_OFF: ["SET foreign_key_checks=0", "SET FOREIGN_KEY_CHECKS = 0;"],
    StatementKind.CHECKS_ON: ["SET foreign_key_checks=1", "set session foreign_key_checks = ON"],
    StatementKind.STATE: [
        "SET sql_mode = ''",
        "SET autocommit=1",
        "SET GLOBAL foreign_key_checks=0",
        "SET foreign_key_checks=0, sql_mode=''",
        "SET @a = 1",
        "SELECT @a := 1",
        "SELECT@a:=1",
        "SELECT 1,@`a`",
        "SELECT id INTO @a FROM t",
        "UPDATE t SET a = @a := 1",
        "LOAD DATA INFILE 'x' INTO TABLE t (@a)",
        "SELECT GET_LOCK('a', 1)",
        "SELECT release_lock ('a')",
        "DO GET_LOCK('a', 1)",
        "CREATE TEMPORARY TABLE t (a int)",
        "CREATE OR REPLACE TEMPORARY TABLE t (a int)",
        "DROP TEMPORARY TABLE t",
        "CREATE TABLE t AS SELECT @a := 1",
        "LOCK TABLES t WRITE",
        "UNLOCK TABLES",
        "USE other",
        "/* hidden */ USE other",
        "SELECT 1; USE other",
        "SELECT 1;;USE other",
        "SELECT 'it''s'; USE other",
        "SELECT 'a\\'; USE other; -- '",
        "SELECT 'unterminated; USE other",
        "/*! USE other */",
        "SELECT 1 /*M! ; USE other */",
        "SELECT 1 /* unterminated ; USE other",
        "CALL p()",
        "PREPARE s FROM 'SELECT 1'",
        "EXECUTE s",
        "HANDLER t OPEN",
        "BEGIN",
        "START TRANSACTION",
        "COMMIT",
        "ROLLBACK",
        "ROLLBACK AND CHAIN",
        "XA START 'x'",
        "FLUSH TABLES WITH READ LOCK",
        "LOAD INDEX INTO CACHE t",
        "CREATE PROCEDURE p() BEGIN SELECT 1; END",
        "CREATE PROCEDURE p() SELECT 1; USE other",
        "something new",
        "",
        "@",
    ],
}


@pytest.mark.parametrize(
    ("sql", "kind"), [(sql, kind) for kind, cases in CASES.items() for sql in cases]
)
def test_kinds(sql: str | bytes, kind: StatementKind) -> None:
    assert classify(sql) is kind


@pytest.mark.parametrize("kind", CASES)
def test_long_statements_are_read_the_same_way(kind: StatementKind) -> None:
    for sql in CASES[kind]:
        if kind in (StatementKind.READ, StatementKind.WRITE, StatementKind.STATE) and isinstance(
            sql, str
        ):
            padded = f"{sql}{' ' * 5000}"
            assert classify(padded) is kind, sql


def test_a_bulk_insert_is_a_plain_write() -> None:
    sql = "INSERT INTO `t` (`a`, `b`) VALUES " + ", ".join(["(%s, %s)"] * 5000)
    assert classify(sql) is StatementKind.WRITE
    assert classify(bytearray(sql.encode())) is StatementKind.WRITE


@pytest.mark.parametrize(
    ("sql", "why"),
    [
        ("SET PASSWORD = 'secret'", "SET"),
        ("SELECT GET_LOCK('a', 1)", "GET_LOCK"),
        ("SELECT @a := 1", "SELECT with user variable"),
        ("SELECT 1; USE other", "several statements"),
        ("SELECT 'a\\'; USE x", "several statements"),
        ("use x", "USE"),
    ],
)
def test_the_reason_tells_no_values(sql: str, why: str) -> None:
    assert reason(sql) == why


@pytest.mark.parametrize(
    ("sql", "may_write"),
    [
        (
            "SELECT `a` FROM `t` INNER JOIN `u` ON (`t`.`id` = `u`.`t_id`) WHERE (`b` IN (1, 2))",
            False,
        ),
        ("SELECT COUNT(*) AS `n`, lower(`x`) FROM (SELECT 1) s WHERE `x` = 'f(x)'", False),
        ("SELECT take(1)", True),
        ("SELECT `take`(1)", True),
        ('SELECT "take" (1)', True),
        ("SELECT take /* lower */ (1)", True),
        ("SELECT take -- lower\n (1)", True),
        ("SELECT take # lower\n (1)", True),
        ("SELECT 'lower(' , lower( take (1))", True),
        ("SELECT lower(`a`) -- take(1)", False),
        (f"SELECT {'x' * 99}lower(1)", True),
        ("SELECT site." + " " * 99 + "lower(1)", True),
        ("SELECT a FROM t WHERE id IN (" + ", ".join(["%s"] * 1000) + ")", False),
        ("SELECT take$lower(1)", True),
        ("SELECT a FROM t WHERE b LIKE CONCAT(REPLACE(c, '\\\\', '\\\\\\\\'), '%%')", False),
        ("SELECT site.lower('A')", True),
        ("SELECT `site` . lower('A')", True),
        ("SELECT 'a\\'', take(1)", True),
        ("SELECT /*! take(1) */", True),
    ],
)
def test_reads_that_may_call_stored_functions(sql: str, may_write: bool) -> None:
    assert calls_stored_function(sql) is may_write
    assert calls_stored_function(sql.encode()) is may_write
