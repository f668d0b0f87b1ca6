"""Classify SQL statements by what they do to the session that runs them. Pure functions.

All schemas of a node share its sessions. The search path of a schema is set for one transaction, in
the same packet as the statement. This module finds two sorts of statements for which this does not
work: those that the server refuses in a packet with others, and those that leave state in the
session.
"""

from __future__ import annotations

import re
from enum import IntEnum
from functools import lru_cache

from sharded_orm.backends.function_calls import may_call
from sharded_orm.backends.postgresql.statement_text import strip
from sharded_orm.backends.savepoints import parse_savepoint


class PostgreSQLKind(IntEnum):
    """The kinds of statements. Callers compare kinds by ``<``, so the order matters."""

    READ = 0
    """A plain read."""
    WRITE = 1
    """Any statement that leaves no state in the session."""
    INSERT = 2
    """A write that may take a number of a sequence, which ``lastval()`` would return."""
    SAVEPOINT = 3
    ROLLBACK_TO = 4
    RELEASE = 5
    SET_TRANSACTION = 6
    """``SET TRANSACTION``: no query may come before this statement in its transaction."""
    BARE = 7
    """A statement that PostgreSQL refuses outside of a transaction block. So in autocommit, nothing is
    sent with it: a packet of several statements counts as a transaction block.
    """
    EXTENSION = 8
    """``CREATE EXTENSION`` that does not say in which schema."""
    AFFINE = 9
    """A statement that reads what an earlier statement left in the session, such as ``lastval()``."""
    MAYBE_ALONE = 10
    """A statement that PostgreSQL may refuse in a transaction block: ``CALL``, or a ``DO`` that may end
    transactions, or ``REINDEX TABLE``, which is refused for a partitioned table.
    """
    ALONE = 11
    """A statement that PostgreSQL refuses in a transaction block, such as ``VACUUM``."""
    CONTROL = 12
    """Text that begins or ends a transaction by itself, or might do so."""
    STATE = 13
    """A statement that leaves state in the session, or might do so."""
    PATH = 14
    """A statement that changes the search path of the session, or might do so."""


# The kinds of statements of at most this many characters are cached. For longer ones, such as
# queries over many shards and bulk inserts, only the last few kinds are kept, because their texts
# would fill the memory.
_CACHED_LENGTH = 2000
_CACHE_SIZE = 2048
_LONG_LENGTH = 300_000
_LONG_CACHE_SIZE = 8

_READS = frozenset(["SELECT", "SHOW", "EXPLAIN", "VALUES", "TABLE"])
_WRITES = frozenset([
    "ALTER", "ANALYZE", "CLOSE", "COMMENT", "COPY", "CREATE", "DELETE", "DROP", "FETCH", "GRANT",
    "IMPORT", "INSERT", "MERGE", "MOVE", "NOTIFY", "REASSIGN", "REFRESH", "REVOKE", "SECURITY",
    "TRUNCATE", "UPDATE", "WITH",
])  # fmt: skip

# The words of _WRITES that begin a statement which may take a number of a sequence by nextval(), as
# INSERT does for an id. UPDATE is not listed, so a number that its trigger takes goes unnoticed.
_INSERTS = frozenset(["COPY", "INSERT", "MERGE", "WITH"])
_CONTROL = frozenset(
    ["ABORT", "BEGIN", "COMMIT", "END", "RELEASE", "ROLLBACK", "SAVEPOINT", "START"]
)

_NEEDS_STRIPPING = ("'", '"', "--", "/*", "$", ";")
_FIRST_WORD = re.compile(r"[\s(]*([A-Za-z_]+)")
_QUOTED_NAME = re.compile(r'"([a-z_][a-z0-9_]*)"')
# A cheap first test before the regular expressions below: only a text that contains one of these
# words can match one of them.
_SUSPICIOUS = (
    "SET_CONFIG", "ADVISORY", "SETSEED", "SET_LIMIT", "DBLINK", "CURRVAL", "LASTVAL", "TEMP", "PG_SETTINGS",
    "REPLICATION_ORIGIN", 'U&"',
)  # fmt: skip
_STATEFUL_FUNCTION = re.compile(
    r"\b(SET_CONFIG|PG_(?:TRY_)?ADVISORY_LOCK(?:_SHARED)?|PG_ADVISORY_UNLOCK\w*|SETSEED|SET_LIMIT"
    r"|DBLINK_(?:CONNECT|DISCONNECT|OPEN|CLOSE|SEND_QUERY)\w*|PG_REPLICATION_ORIGIN_SESSION_\w+)\s*\("
)
_LOCAL_CONFIG = re.compile(r"\bSET_CONFIG\s*\([^()]*,\s*(?:IS_LOCAL\s*(?:=>|:=)\s*)?TRUE\s*\)")
# Matches a call of set_config() whose first argument, the name of a setting, is not a literal but
# another expression. (Literals have been replaced by question marks.) Such a call might change any
# setting.
_ANY_CONFIG = re.compile(r"\bSET_CONFIG\s*\(\s*[^?]")
_AFFINE = re.compile(r"\b(?:CURRVAL|LASTVAL)\s*\(")
_PATH = re.compile(
    r"(?:SET|RESET)\b.*\bSEARCH_PATH\b|RESET\s+ALL\b|SET\s+(?:SESSION\s+)?SCHEMA\b|DISCARD\s+ALL\b"
    # SET or RESET with a quoted name. The name has been replaced by a question mark, and could have
    # been "search_path".
    r"|(?:SET|RESET)\s+(?:SESSION\s+)?\?",
    re.DOTALL,
)
_DEFAULT_PATH = re.compile(
    r"\bRESET\s+(?:ALL|SEARCH_PATH)\b|\bDISCARD\s+ALL\b|\bSEARCH_PATH\s*(?:TO|=)\s*DEFAULT\b"
)
_LOCKING_READ = re.compile(r"\bFOR\s+(?:UPDATE|SHARE|NO\s+KEY|KEY)\b|\bINTO\b")
# Matches INTO, with INSERT or MERGE if that stands before it. INTO alone, as in SELECT … INTO,
# names a table that the statement creates.
_NEW_ROWS = re.compile(r"\b(?:(?:INSERT|MERGE)\s+)?INTO\b")
_NUMBERS = re.compile(r"\bNEXTVAL\b|\bSETVAL\b")
_TEMPORARY = re.compile(
    r"\bCREATE\s+(?:OR\s+REPLACE\s+)?(?:(?:LOCAL|GLOBAL)\s+)?(?:TEMPORARY|TEMP)\b"
    r"|\bINTO\s+(?:(?:LOCAL|GLOBAL)\s+)?(?:TEMPORARY|TEMP)\b|\bPG_TEMP(?:_\d+)?\b"
)
_SETTINGS = re.compile(r"\bUPDATE\s+(?:ONLY\s+)?(?:PG_CATALOG\s*\.\s*)?PG_SETTINGS\b")
# The patterns from here on are used on text whose literals and comments were removed.
_ALONE = re.compile(
    r"(?:VACUUM|CLUSTER|CHECKPOINT|REINDEX|ALTER\s+SYSTEM|COMMIT\s+PREPARED|ROLLBACK\s+PREPARED)\b"
    r"|(?:CREATE|DROP|ALTER)\s+(?:DATABASE|TABLESPACE|SUBSCRIPTION)\b"
    r"|(?:CREATE|DROP)\s+(?:UNIQUE\s+)?INDEX\s+CONCURRENTLY\b"
    r"|ALTER\b.*\bDETACH\s+PARTITION\b.*\bCONCURRENTLY\b",
    re.DOTALL,
)
# Matches those statements of _ALONE that the server refuses in a transaction block only if the
# table is partitioned. Most tables are not.
_MAYBE_ALONE = re.compile(
    r"REINDEX\s*(?:\((?![^()]*\bCONCURRENTLY\b)[^()]*\)\s*)?(?:TABLE|INDEX)\s+(?!CONCURRENTLY\b)"
    r"|CLUSTER\b\s*(?:\([^()]*\)\s*|VERBOSE\s+)?(?!VERBOSE\s*$)[\w?]"
)
_BARE = re.compile(r"(?:LOCK|PREPARE\s+TRANSACTION)\b|DECLARE\b(?!.*\bWITH\s+HOLD\b)", re.DOTALL)
_SET_STATELESS = re.compile(r"SET\s+(?:LOCAL|CONSTRAINTS)\b")
_SET_TRANSACTION = re.compile(r"SET\s+TRANSACTION\b")
_EXTENSION = re.compile(r"CREATE\s+EXTENSION\b(?!.*\bSCHEMA\b)", re.DOTALL)
_CHAIN = re.compile(r"\bAND\s+CHAIN\b")
# Matches the beginning of CREATE FUNCTION with a body in standard SQL. Such a body contains
# semicolons, up to the word END.
_ATOMIC_BODY = re.compile(r"CREATE\b.*\bBEGIN\s+ATOMIC\b(?P<body>.*)", re.DOTALL)
# Matches words that leave state in the session, in the body of a DO statement.
_BODY_STATE = re.compile(
    r"\b(?:LISTEN|LOAD|TEMPORARY|TEMP|PG_TEMP|PG_SETTINGS)\b"
    r"|\b(?:RESET|DISCARD|PREPARE|DEALLOCATE)\b"
)
# Matches SET anywhere in a body, because a comment may stand before it, or EXECUTE may run it from
# a text. SET in an UPDATE or in a foreign key (ON DELETE SET NULL) does not count.
_BODY_SET = re.compile(r"\bSET\s+(?!LOCAL\b|CONSTRAINTS\b|NULL\b|DEFAULT\b)")
_BODY_UPDATE = re.compile(r"\b(?:UPDATE|DO\s+UPDATE)\b[^;]*?\bSET\b", re.DOTALL)
_BODY_CONTROL = re.compile(r"\b(?:COMMIT|ROLLBACK|CALL)\b")
# Words of SQL and functions of the server that may stand before a parenthesis, and change nothing.
# Any other word before a parenthesis may be the name of a stored function, which may write.
_HARMLESS_WORDS = """
    SELECT FROM WHERE AND OR NOT IN EXISTS AS ON ANY ALL SOME VALUES USING OVER FILTER UNION EXCEPT INTERSECT
    BY THEN ELSE WHEN CASE LIMIT OFFSET LIKE ILIKE BETWEEN IS JOIN DISTINCT HAVING LATERAL WITHIN GROUP ARRAY
    ROW COUNT SUM AVG MIN MAX STDDEV STDDEV_POP STDDEV_SAMP VARIANCE VAR_POP VAR_SAMP BOOL_AND BOOL_OR EVERY
    ARRAY_AGG STRING_AGG JSON_AGG JSONB_AGG JSONB_BUILD_OBJECT JSON_BUILD_OBJECT JSONB_BUILD_ARRAY COALESCE
    NULLIF GREATEST LEAST LOWER UPPER INITCAP LENGTH CHAR_LENGTH SUBSTRING SUBSTR TRIM BTRIM LTRIM RTRIM LEFT
    RIGHT LPAD RPAD POSITION STRPOS OVERLAY REPLACE REVERSE REPEAT CONCAT CONCAT_WS MD5 SHA224 SHA256 SHA384
    SHA512 ENCODE DECODE CHR ASCII CAST EXTRACT DATE_PART DATE_TRUNC NOW STATEMENT_TIMESTAMP AGE TO_CHAR
    TO_DATE TO_TIMESTAMP ROUND ABS CEIL CEILING FLOOR MOD POWER SQRT SIGN LN LOG EXP TRUNC DIV PI RANDOM SIN COS TAN
    COT ASIN ACOS ATAN ATAN2 DEGREES RADIANS JSONB_EXTRACT_PATH JSONB_EXTRACT_PATH_TEXT JSONB_TYPEOF
    JSONB_ARRAY_LENGTH JSON_OBJECT JSON_ARRAY ANY_VALUE BIT_AND BIT_OR BIT_XOR CORR COVAR_POP COVAR_SAMP REGR_AVGX
    REGR_AVGY REGR_COUNT REGR_INTERCEPT REGR_R2 REGR_SLOPE REGR_SXX REGR_SXY REGR_SYY CURRENT_TIMESTAMP
    GEN_RANDOM_UUID UUIDV4 UUIDV7 HOST ISEMPTY LOWER_INC LOWER_INF UPPER_INC UPPER_INF AKEYS AVALS SETWEIGHT
    TS_HEADLINE TS_RANK_CD SIMILARITY WORD_SIMILARITY STRICT_WORD_SIMILARITY UNACCENT
    ROW_NUMBER RANK DENSE_RANK PERCENT_RANK CUME_DIST NTILE LAG LEAD FIRST_VALUE LAST_VALUE NTH_VALUE
    PERCENTILE_CONT PERCENTILE_DISC UNNEST GENERATE_SERIES ARRAY_LENGTH CARDINALITY TO_TSVECTOR TO_TSQUERY
    PLAINTO_TSQUERY PHRASETO_TSQUERY WEBSEARCH_TO_TSQUERY TS_RANK CURRENT_SETTING CURRENT_SCHEMA VERSION
    PG_BACKEND_PID FORMAT_TYPE PG_GET_EXPR PG_TABLE_IS_VISIBLE VARCHAR CHAR CHARACTER VARYING NUMERIC DECIMAL
    TIMESTAMP TIME INTERVAL BIT TEXT INTEGER BIGINT
"""
_HARMLESS = frozenset(_HARMLESS_WORDS.split())
# Matches the name of a function at the end of a text. If the text ends with a quoted name, this
# matches only the closing quote, or the "?" that has replaced the whole name.
_LAST_WORD = re.compile(r"(?:[\w$]+|[?\"])\Z")
_COMMENTS = ("--", "/*")
# No word of _HARMLESS is as long as this.
_LONG_WORD = 70
# After one of these words, a parenthesis begins names of columns, as in "AS u (a, b)".
_BEFORE_COLUMNS = re.compile(r"\b(?:AS|INTO|WITH) \Z")


def classify(sql: str) -> PostgreSQLKind:
    """Return the kind of the statement ``sql``.

    The results are cached. For long statements, only the last few results are kept.
    """
    length = len(sql)
    if length <= _CACHED_LENGTH:
        return _cached(sql)
    return _cached_long(sql) if length <= _LONG_LENGTH else _classify(sql)


def reason(sql: str) -> str:
    """Return why the statement ``sql`` pins its session, in a word or two, for logs.

    A pinned session is kept for one alias. The returned text contains no values of ``sql``.
    """
    bare = strip(sql)
    if bare is None:
        return "text with an open quote"
    upper = bare.upper()
    if function := _STATEFUL_FUNCTION.search(upper):
        return function[1].lower()
    if ";" in bare.strip("; \t\r\n"):
        return "several statements"
    word = _FIRST_WORD.match(upper)
    return word[1] if word else "?"


def is_several(sql: str) -> bool:
    """Whether ``sql`` contains more than one statement. Also True if that is unclear."""
    if ";" not in sql:
        return False
    bare = strip(sql)
    return bare is None or ";" in bare.strip("; \t\r\n")


def begins_anew(sql: str) -> bool:
    """Whether ``sql`` ends a transaction and begins the next one at once, as ``COMMIT AND CHAIN``
    does.

    :param sql: a statement of the kind CONTROL, which begins or ends a transaction.
    """
    bare = strip(sql)
    return bare is None or _CHAIN.search(bare.upper()) is not None


def prepares_transaction(sql: str) -> bool:
    """Whether ``sql`` is ``PREPARE TRANSACTION``.

    :param sql: a statement of the kind BARE, which the server refuses outside of a transaction.
    """
    bare = strip(sql)
    return bare is None or bare.lstrip("( \t\r\n").upper().startswith("PREPARE")


def resets_path(sql: str) -> bool:
    """Whether ``sql`` resets the search path to the server's default, as ``RESET ALL`` does.

    :param sql: a statement of the kind PATH, which changes the search path.
    """
    bare = strip(sql)
    return bare is None or _DEFAULT_PATH.search(bare.upper()) is not None


def is_repeatable(sql: str) -> bool:
    """Whether the statement ``sql`` may be sent again if its session was lost before the result
    arrived.

    True if ``sql`` calls no function that might write. The server may have run the statement before
    its result was lost, so the function might write twice. Results for short statements are cached.

    :param sql: a statement that reads or writes rows.
    """
    if "(" not in sql:
        return True
    return _repeatable_cached(sql) if len(sql) <= _CACHED_LENGTH else _is_repeatable(sql)


def _is_repeatable(sql: str) -> bool:
    return not may_call(sql, _ends_in_call, _COMMENTS, strip)


def _ends_in_call(text: str) -> bool:
    """Whether ``text``, before a parenthesis, ends in the name of a function that may write."""
    text = text.rstrip()
    word = _LAST_WORD.search(text, max(0, len(text) - _LONG_WORD))
    if word is None:
        return False
    before = text[: word.start()]
    if _BEFORE_COLUMNS.search(before, max(0, len(before) - 6)):
        return False
    # A function with a schema other than pg_catalog is not one of the server's own.
    schema = before.rstrip()
    if schema.endswith(".") and not schema.endswith("PG_CATALOG."):
        return True
    return word[0] not in _HARMLESS and not word[0].isdigit()


def makes_table(sql: str) -> bool:
    """Whether ``sql`` is ``WITH … SELECT … INTO table``, a query that creates a table."""
    bare = (strip(sql) or "").upper()
    return bare.startswith("WITH") and "INTO" in _NEW_ROWS.findall(bare)


def _classify(sql: str) -> PostgreSQLKind:
    text = sql.strip()
    # Look for savepoints first. Django quotes their names, and quoted names are removed below.
    if (savepoint := parse_savepoint(text)) is not None:
        return PostgreSQLKind[savepoint.action.name]
    bare: str | None = text
    if any(mark in text for mark in _NEEDS_STRIPPING):
        bare = strip(text)
        if bare is None:
            return PostgreSQLKind.CONTROL
    upper = bare.upper().strip("; \t\r\n") if bare else ""
    raw = text.upper()
    kinds = [_by_word(part, raw) for part in _parts(upper)]
    kind = _of_several(kinds) if len(kinds) != 1 else kinds[0]
    if any(word in raw for word in _SUSPICIOUS):
        kind = max(kind, _by_names(upper, text, raw))
    return kind


def _parts(upper: str) -> list[str]:
    """Split a text into its statements, at the semicolons. Semicolons in the body of a function do
    not separate statements.
    """
    if ";" not in upper:
        return [upper] if upper else []
    parts: list[str] = []
    is_open = False
    for part in (part.strip() for part in upper.split(";")):
        if is_open:
            parts[-1] += " " + part
            is_open = part != "END"
        elif part:
            parts.append(part)
            body = _ATOMIC_BODY.match(part)
            is_open = body is not None and body["body"].strip() != "END"
    # The END of a function's body is missing, so the last part may contain any statement. Add
    # "END", which counts as a statement that may end a transaction.
    return [*parts, "END"] if is_open else parts


def _of_several(kinds: list[PostgreSQLKind]) -> PostgreSQLKind:
    if any(PostgreSQLKind.SAVEPOINT <= k <= PostgreSQLKind.RELEASE for k in kinds):
        kinds = [*kinds, PostgreSQLKind.CONTROL]
    strongest = max(kinds, default=PostgreSQLKind.WRITE)
    if PostgreSQLKind.EXTENSION in kinds and strongest < PostgreSQLKind.CONTROL:
        return PostgreSQLKind.EXTENSION
    if PostgreSQLKind.MAYBE_ALONE <= strongest <= PostgreSQLKind.ALONE:
        # The server refuses one of these statements in a packet with others. The text has several
        # statements, so the server raises an error at this one, and undoes the whole text. No
        # special treatment is needed, so send the text like a write.
        return PostgreSQLKind.WRITE
    if strongest in (PostgreSQLKind.BARE, PostgreSQLKind.SET_TRANSACTION):
        return PostgreSQLKind.WRITE
    return max(strongest, PostgreSQLKind.WRITE)


def _by_word(upper: str, raw: str) -> PostgreSQLKind:
    """Return the kind of one statement, judged by its first words.

    :param upper: the statement in upper case, without literals and comments.
    :param raw: the whole text in upper case, with the bodies of DO statements.
    """
    match = _FIRST_WORD.match(upper)
    if match is None:
        return PostgreSQLKind.STATE
    word = match[1]
    if _ALONE.match(upper):
        maybe = _MAYBE_ALONE.match(upper)
        return PostgreSQLKind.MAYBE_ALONE if maybe else PostgreSQLKind.ALONE
    if _BARE.match(upper):
        return PostgreSQLKind.BARE
    if word in _CONTROL:
        return PostgreSQLKind.CONTROL
    if word == "SET":
        if _SET_TRANSACTION.match(upper):
            return PostgreSQLKind.SET_TRANSACTION
        if _SET_STATELESS.match(upper):
            return PostgreSQLKind.WRITE
    if _PATH.match(upper):
        return PostgreSQLKind.PATH
    if word == "CALL":
        return PostgreSQLKind.MAYBE_ALONE
    if word == "DO":
        return _of_body(raw)
    is_read = word in _READS
    if not is_read and word not in _WRITES:
        return PostgreSQLKind.STATE
    if _EXTENSION.match(upper):
        return PostgreSQLKind.EXTENSION
    if word == "EXPLAIN":
        # EXPLAIN ANALYZE runs the statement that it explains, and this may write. So treat each
        # EXPLAIN as a write.
        return PostgreSQLKind.WRITE
    if word in _INSERTS or ((is_read or word == "UPDATE") and _takes_numbers(upper)):
        return PostgreSQLKind.INSERT
    if is_read and ("FOR" in upper or "INTO" in upper) and _LOCKING_READ.search(upper):
        return PostgreSQLKind.WRITE
    return PostgreSQLKind.READ if is_read else PostgreSQLKind.WRITE


def _takes_numbers(upper: str) -> bool:
    return "TVAL" in upper and _NUMBERS.search(upper) is not None


def _of_body(raw: str) -> PostgreSQLKind:
    """Return the kind of a DO statement, judged by its body.

    :param raw: a text in upper case that contains the body.
    """
    sets = _BODY_SET.search(_BODY_UPDATE.sub(" ", raw))
    if sets or _BODY_STATE.search(raw) or _STATEFUL_FUNCTION.search(raw):
        # For the kind STATE, the search path is sent in front of the statement, and is valid until
        # its transaction ends. The body may end this transaction and go on without the path. In
        # this case, return PATH: the path is then set for the whole session.
        changes_path = "SEARCH_PATH" in raw or _BODY_CONTROL.search(raw)
        return PostgreSQLKind.PATH if changes_path else PostgreSQLKind.STATE
    return PostgreSQLKind.MAYBE_ALONE if _BODY_CONTROL.search(raw) else PostgreSQLKind.INSERT


def _by_names(upper: str, text: str, raw: str) -> PostgreSQLKind:
    """Return the kind of a text, judged by the functions and tables in it. Return READ if none of
    them has to do with the state of the session.
    """
    if 'U&"' in raw:
        # In U&"…", characters can be written as numbers, so this might be the name of any function.
        # Assume the worst: that it changes the search path.
        return PostgreSQLKind.PATH
    if '"' in text:
        upper = _QUOTED_NAME.sub(r"\1", strip(text, names=True) or "").upper()
    if _TEMPORARY.search(upper):
        return PostgreSQLKind.STATE
    if _SETTINGS.search(upper):
        return PostgreSQLKind.PATH
    calls = _LOCAL_CONFIG.sub("", upper)
    if _STATEFUL_FUNCTION.search(calls):
        may_set_path = _ANY_CONFIG.search(calls) or ("SET_CONFIG" in calls and "SEARCH_PATH" in raw)
        return PostgreSQLKind.PATH if may_set_path else PostgreSQLKind.STATE
    if _AFFINE.search(upper):
        return PostgreSQLKind.AFFINE
    # A set_config() that lasts only for the transaction leaves no state, so treat it like a write.
    return PostgreSQLKind.WRITE if "SET_CONFIG" in upper else PostgreSQLKind.READ


_cached = lru_cache(maxsize=_CACHE_SIZE)(_classify)
_cached_long = lru_cache(maxsize=_LONG_CACHE_SIZE)(_classify)
_repeatable_cached = lru_cache(maxsize=_CACHE_SIZE)(_is_repeatable)
