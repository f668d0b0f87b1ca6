"""Classify SQL statements by what they do to the session that runs them. Pure functions.

All shards of a node share its sessions. A statement that may leave state in its session, such as
``SET``, *pins* the session: one alias keeps it until the alias's connection is closed.

The functions need only the text of a statement, without its parameters, because the kind of a
statement does not depend on values. The functions do not know what stored functions, triggers and
the server's settings do.
"""

from __future__ import annotations

import re
from enum import IntEnum
from functools import lru_cache

from sharded_orm.backends.function_calls import may_call
from sharded_orm.backends.savepoints import parse_savepoint


class StatementKind(IntEnum):
    """The kinds of statements. Callers compare kinds by ``<``, so the order matters.

    Statements of the kinds up to WRITE leave no state in the session.
    """

    READ = 0
    """A plain read. It may be repeated if its session turns out to be dead."""
    WRITE = 1
    """A statement that changes or locks rows, and leaves no session state."""
    IMPLICIT = 2
    """A statement that commits implicitly (DDL), uses a savepoint that Django did not create, or asks
    whether a transaction is open.
    """
    AFFINE = 3
    """A statement that reads what an earlier statement left in the session, such as ``LAST_INSERT_ID()``."""
    SAVEPOINT = 4
    ROLLBACK_TO = 5
    RELEASE = 6
    CHECKS_OFF = 7
    """``SET foreign_key_checks = 0``."""
    CHECKS_ON = 8
    STATE = 9
    """A statement that leaves state in the session, or might do so."""


# The kinds of statements of at most this many characters are cached. Longer statements, such as
# bulk inserts, are seldom repeated, and would fill the cache.
_CACHED_LENGTH = 2000
_CACHE_SIZE = 2048

SEVERAL_STATEMENTS = "several statements"
_READS = frozenset(["SELECT", "SHOW", "EXPLAIN", "DESCRIBE", "DESC", "VALUES", "HELP"])
_EXPLAINS = frozenset(["EXPLAIN", "DESCRIBE", "DESC"])
_WRITES = frozenset(
    ["INSERT", "UPDATE", "DELETE", "REPLACE", "WITH", "DO", "LOAD", "TABLE", "KILL"]
)
_CHANGES = frozenset(["INSERT", "UPDATE", "DELETE", "REPLACE"])
_DDL = frozenset(["CREATE", "ALTER", "DROP", "RENAME", "TRUNCATE", "OPTIMIZE", "REPAIR", "CHECK",
                  "CHECKSUM", "GRANT", "REVOKE"])  # fmt: skip

_FIRST_WORD = re.compile(r"[\s(]*([A-Za-z_]+)")
# Marks that may begin a comment ("--"), separate two statements (";") or begin a variable ("@").
# But such a mark may also be a part of a literal or a comment, where it has no effect. So if a
# statement contains one of them, its literals and comments are removed before it is classified.
_SUSPICIOUS_TEXT = ("@", ";", "/*", "--", "#")
# A cheap first test before the regular expressions: only a statement that contains one of these
# texts can match _PIN_FUNCTION or _AFFINE.
_SUSPICIOUS_NAMES = (
    "_LOCK",
    "LAST",
    "FOUND_ROWS",
    "ROW_COUNT",
    "WARNING",
    "ERRORS",
    "PREVIOUS",
    "@@",
)
_PIN_FUNCTION = re.compile(r"\b(GET_LOCK|RELEASE_LOCK|RELEASE_ALL_LOCKS)\b")
_AFFINE = re.compile(
    r"\bLAST_INSERT_ID\s*\(\s*\)|\bFOUND_ROWS\b|\bROW_COUNT\s*\(|^SHOW\s+(COUNT|WARNINGS|ERRORS)\b"
    r"|\bLASTVAL\s*\(|\bPREVIOUS\s+VALUE\b"
    r"|@@(SESSION\.)?(LAST_INSERT_ID|IDENTITY|INSERT_ID|WARNING_COUNT|ERROR_COUNT)\b"
)
_INSERT_ID = re.compile(r"LAST_INSERT_ID|IDENTITY|@@(SESSION\.)?INSERT_ID")
_LOCKING_READ = re.compile(r"\bFOR\s+UPDATE\b|\bLOCK\s+IN\s+SHARE\b|\bFOR\s+SHARE\b|\bINTO\b|\bNEXTVAL\b"
                           r"|\bNEXT\s+VALUE\b")  # fmt: skip
# A cheap first test before the regular expression: only a statement that contains one of these
# words can match _LOCKING_READ. For a SELECT over 16 shards, the regular expression takes a fifth
# of a millisecond.
_LOCKING_WORDS = ("FOR", "LOCK", "INTO", "NEXT")
_LITERALS_AND_COMMENTS = re.compile(
    r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|`(?:[^`]|``)*`"  # quoted
    r"|(/\*.*?\*/|--(?=\s|$)[^\n]*|\#[^\n]*)",  # comment
    re.DOTALL,
)
_OTHER_SAVEPOINT = re.compile(r"(SAVEPOINT|ROLLBACK\s+(WORK\s+)?TO|RELEASE\s+SAVEPOINT)\s")
_CHECKS = re.compile(
    r"SET\s+(?:SESSION\s+|@@SESSION\.|@@)?FOREIGN_KEY_CHECKS\s*:?=\s*(0|1|OFF|ON)[\s;]*$"
)
_TEMPORARY = re.compile(r"(CREATE|DROP)\s+(OR\s+REPLACE\s+)?TEMPORARY\b")
_ANALYZE_TABLE = re.compile(r"ANALYZE\s+((NO_WRITE_TO_BINLOG|LOCAL)\s+)?TABLE\b")
_LOAD_ROWS = re.compile(r"LOAD\s+(DATA|XML)\b")
_HOST_OR_SYSTEM = re.compile(r"(?<=[\w?])@(?=[\w?])|@@")

# Words of SQL and functions of the server that may stand before a parenthesis in a query, and
# change nothing. Any other word before a parenthesis may be the name of a stored function, which
# may write.
_HARMLESS_WORDS = """
    SELECT FROM WHERE AND OR NOT IN EXISTS AS ON ANY ALL SOME VALUES ROW USING OVER UNION EXCEPT INTERSECT BY
    THEN ELSE WHEN CASE LIKE REGEXP RLIKE BETWEEN IS JOIN DISTINCT HAVING XOR DIV MOD BINARY INTERVAL AGAINST
    COUNT SUM AVG MIN MAX STD STDDEV STDDEV_POP STDDEV_SAMP VARIANCE VAR_POP VAR_SAMP BIT_AND BIT_OR BIT_XOR
    GROUP_CONCAT JSON_ARRAYAGG JSON_OBJECTAGG JSON_OBJECT JSON_ARRAY JSON_EXTRACT JSON_UNQUOTE JSON_VALUE
    JSON_CONTAINS JSON_CONTAINS_PATH JSON_TYPE JSON_VALID JSON_LENGTH COALESCE IF IFNULL NULLIF ISNULL GREATEST
    LEAST LOWER LCASE UPPER UCASE LENGTH CHAR_LENGTH SUBSTRING SUBSTR SUBSTRING_INDEX TRIM LTRIM RTRIM LEFT RIGHT
    LPAD RPAD LOCATE POSITION INSTR REPLACE REVERSE REPEAT CONCAT CONCAT_WS FORMAT ELT FIELD MD5 SHA SHA1 SHA2
    CRC32 HEX UNHEX CHAR ASCII ORD CAST CONVERT SIGNED UNSIGNED DECIMAL DATETIME EXTRACT DATE TIME YEAR QUARTER
    MONTH WEEK WEEKDAY DAYOFWEEK DAYOFMONTH DAYOFYEAR DAY HOUR MINUTE SECOND MICROSECOND NOW CURDATE CURTIME
    UTC_TIMESTAMP UNIX_TIMESTAMP FROM_UNIXTIME DATE_ADD DATE_SUB DATE_FORMAT STR_TO_DATE TIMESTAMP TIMESTAMPDIFF
    TIMESTAMPADD DATEDIFF TIMEDIFF LAST_DAY MAKEDATE MAKETIME CONVERT_TZ ROUND ABS CEIL CEILING FLOOR POW POWER
    SQRT SIGN LN LOG LOG2 LOG10 EXP TRUNCATE PI RAND SIN COS TAN COT ASIN ACOS ATAN ATAN2 DEGREES RADIANS MATCH SLEEP
    UUID UUID_V4 UUID_V7 VERSION DATABASE SCHEMA CONNECTION_ID ROW_NUMBER RANK DENSE_RANK PERCENT_RANK CUME_DIST NTILE
    LAG LEAD FIRST_VALUE LAST_VALUE NTH_VALUE ANY_VALUE CURRENT_TIMESTAMP TIME_TO_SEC YEARWEEK REGEXP_LIKE VALUE
"""
_HARMLESS = frozenset(_HARMLESS_WORDS.split())
# Matches the word at the end of a text, which may be the name of a function. If the text ends with
# a quoted name, this matches only the closing quote, or the "?" that has replaced the whole name.
_LAST_WORD = re.compile(r"(?:[\w$]+|[?`\"])\Z")
_COMMENTS = ("--", "/*", "#")
# No word of _HARMLESS is as long as this.
_LONG_WORD = 70


def classify(sql: str | bytes | bytearray) -> StatementKind:
    """Return the kind of the statement ``sql``. Results for short statements are cached."""
    if type(sql) is not str:
        sql = bytes(sql).decode("latin-1") if isinstance(sql, (bytes, bytearray)) else str(sql)
    return _cached(sql) if len(sql) <= _CACHED_LENGTH else _classify(sql)


def returns_no_rows(sql: str | bytes | bytearray) -> bool:
    """Whether ``sql`` surely returns no rows.

    :param sql: a statement of the kind WRITE. Some of these do return rows, such as ``SELECT … FOR
        UPDATE`` and ``INSERT … RETURNING``.
    """
    text = (sql if isinstance(sql, str) else bytes(sql).decode("latin-1")).upper()
    first = _FIRST_WORD.match(text)
    return first is not None and first[1] in _CHANGES and "RETURNING" not in text


def reads_insert_id(sql: str | bytes | bytearray) -> bool:
    """Whether ``sql`` reads the id of an earlier insert, as ``LAST_INSERT_ID()`` does.

    :param sql: a statement of the kind AFFINE, which reads state that an earlier statement has
        left.
    """
    text = sql if isinstance(sql, str) else bytes(sql).decode("latin-1")
    return _INSERT_ID.search(text.upper()) is not None


def calls_stored_function(sql: str | bytes | bytearray) -> bool:
    """Whether the query ``sql`` may call a stored function, which may write rows.

    True for each function that is not known as one of the server's own. Results for short
    statements are cached.

    :param sql: a statement of the kind READ.
    """
    text = sql if isinstance(sql, str) else bytes(sql).decode("latin-1")
    if "(" not in text:
        return False
    return _calls_cached(text) if len(text) <= _CACHED_LENGTH else _calls(text)


def _calls(text: str) -> bool:
    return may_call(text, _ends_in_call, _COMMENTS, _bare)


def _ends_in_call(text: str) -> bool:
    """Whether ``text`` ends in the name of a function that may write.

    :param text: the part of a statement before an opening parenthesis.
    """
    text = text.rstrip()
    word = _LAST_WORD.search(text, max(0, len(text) - _LONG_WORD))
    if word is None:
        return False
    # If the name of a schema precedes the function's name, it is a stored function.
    has_schema = text[: word.start()].rstrip().endswith(".")
    return has_schema or (word[0] not in _HARMLESS and not word[0].isdigit())


def reason(sql: str | bytes | bytearray) -> str:
    """Return why the statement ``sql`` pins its session, in a word or two, for logs.

    A pinned session is kept for one alias. The returned text contains no values of ``sql``.

    :param sql: a statement of the kind STATE.
    """
    text = sql if isinstance(sql, str) else bytes(sql).decode("latin-1")
    bare = _bare(text)
    if bare is None:
        # Nobody can tell where the literals and comments end. So the text may contain several
        # statements, which is reason enough to pin the session.
        return SEVERAL_STATEMENTS
    upper = bare.upper()
    if function := _PIN_FUNCTION.search(upper):
        return function[1]
    if ";" in bare.rstrip("; \t\r\n"):
        return SEVERAL_STATEMENTS
    word = _FIRST_WORD.match(upper)
    name = word[1] if word else "?"
    return f"{name} with user variable" if name in _READS or name in _WRITES else name


def _bare(sql: str) -> str | None:
    """Return ``sql`` without comments, and with ``?`` in place of each literal and each quoted
    name.

    Return None if it cannot be known where literals or comments end.
    """
    if "\\" in sql or "/*!" in sql or "/*M!" in sql:
        # Nobody can tell which parts of such a text are code. The effect of a backslash depends on
        # the SQL mode, and executable comments (``/*! … */``) contain code.
        return None
    bare = _LITERALS_AND_COMMENTS.sub(lambda match: " " if match[1] else "?", sql)
    return None if any(mark in bare for mark in ("'", '"', "`", "/*")) else bare.strip()


def _classify(sql: str) -> StatementKind:
    text = sql.strip()
    # Look for savepoints first. Django quotes their names, and quoted names are removed below.
    if (savepoint := parse_savepoint(text)) is not None:
        return StatementKind[savepoint.action.name]
    upper = text.upper()
    if upper.startswith("SET"):
        if checks := _CHECKS.match(upper):
            return (
                StatementKind.CHECKS_OFF if checks[1] in ("0", "OFF") else StatementKind.CHECKS_ON
            )
        return StatementKind.STATE
    if any(mark in text for mark in _SUSPICIOUS_TEXT):
        bare = _bare(text)
        if bare is None:
            return StatementKind.STATE
        bare = bare.rstrip("; \t\r\n").lstrip()
        if ";" in bare:
            return StatementKind.STATE
        upper = bare.upper()
    word = _FIRST_WORD.match(upper)
    if word is None:
        return StatementKind.STATE
    return _by_word(word[1], upper)


def _by_word(word: str, upper: str) -> StatementKind:
    if word == "ANALYZE":
        # ANALYZE TABLE commits, so treat it like DDL. But MariaDB's ANALYZE <statement> runs the
        # statement, so treat that like a write.
        word = "CREATE" if _ANALYZE_TABLE.match(upper) else "UPDATE"
    elif word == "LOAD" and not _LOAD_ROWS.match(upper):
        return StatementKind.STATE
    elif word in ("SAVEPOINT", "ROLLBACK", "RELEASE"):
        return StatementKind.IMPLICIT if _OTHER_SAVEPOINT.match(upper) else StatementKind.STATE
    if word in _DDL:
        if _TEMPORARY.match(upper) or "@" in _HOST_OR_SYSTEM.sub("", upper):
            return StatementKind.STATE
        return StatementKind.IMPLICIT
    read = word in _READS
    if not read and word not in _WRITES:
        return StatementKind.STATE
    if "@" in upper and "@" in upper.replace("@@", ""):
        return StatementKind.STATE
    if any(name in upper for name in _SUSPICIOUS_NAMES):
        if _PIN_FUNCTION.search(upper):
            return StatementKind.STATE
        if _AFFINE.search(upper):
            return StatementKind.AFFINE
    if (
        read
        and word in ("SELECT", "VALUES")
        and any(part in upper for part in _LOCKING_WORDS)
        and _LOCKING_READ.search(upper)
    ):
        return StatementKind.WRITE
    if word in _EXPLAINS and "ANALYZE" in upper:
        # MySQL's EXPLAIN ANALYZE runs the statement, which may write.
        return StatementKind.WRITE
    if read and ("AUTOCOMMIT" in upper or "@@IN_TRANSACTION" in upper):
        return StatementKind.IMPLICIT
    return StatementKind.READ if read else StatementKind.WRITE


_cached = lru_cache(maxsize=_CACHE_SIZE)(_classify)
_calls_cached = lru_cache(maxsize=_CACHE_SIZE)(_calls)
