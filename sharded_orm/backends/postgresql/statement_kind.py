"""Classify statements by what they do to the session that runs them. Pure functions.

All schemas of a node share its sessions. A session finds the tables of a schema by its search path,
which is set for one transaction only. The functions here say which statements cannot share a packet
with the statement that sets the search path, and which leave state in the session.

The text does not show what stored functions and triggers do, so that is not considered.
"""

from __future__ import annotations

import re
from enum import IntEnum
from functools import lru_cache

from sharded_orm.backends.savepoints import SavepointStatement, savepoint_statement


class PostgreSQLKind(IntEnum):
    """The kinds of statements. Callers compare kinds by ``<``, so the order matters."""

    READ = 0
    """A plain read. It may be repeated if its session turns out to be dead."""
    WRITE = 1
    """Any statement that leaves no state in the session."""
    SAVEPOINT = 2
    ROLLBACK_TO = 3
    RELEASE = 4
    SET_TRANSACTION = 5
    """``SET TRANSACTION``: no query may come before this statement in its transaction."""
    BARE = 6
    """A statement that PostgreSQL refuses outside of a transaction block. So in autocommit, nothing is
    sent with it: a packet of several statements counts as a transaction block.
    """
    AFFINE = 7
    """A statement that reads what an earlier statement left in the session, such as ``lastval()``."""
    ALONE = 8
    """A statement that PostgreSQL refuses in a transaction block, such as ``VACUUM``."""
    CONTROL = 9
    """Text that begins or ends a transaction by itself."""
    STATE = 10
    """A statement that leaves state in the session, or might do so."""
    PATH = 11
    """A statement that changes the search path of the session."""


_SAVEPOINTS = {
    SavepointStatement.SAVEPOINT: PostgreSQLKind.SAVEPOINT,
    SavepointStatement.ROLLBACK_TO: PostgreSQLKind.ROLLBACK_TO,
    SavepointStatement.RELEASE: PostgreSQLKind.RELEASE,
}

# Statements of at most this many characters are cached with their kinds. Longer statements, such as
# bulk inserts, are seldom repeated and would fill the cache.
_CACHED_LENGTH = 2000
_CACHE_SIZE = 2048

_READS = frozenset(["SELECT", "SHOW", "EXPLAIN", "VALUES", "TABLE"])
_WRITES = frozenset([
    "ALTER", "ANALYZE", "CHECKPOINT", "CLOSE", "CLUSTER", "COMMENT", "COPY", "CREATE", "DELETE",
    "DROP", "FETCH", "GRANT", "IMPORT", "INSERT", "MERGE", "MOVE", "NOTIFY", "REASSIGN", "REFRESH",
    "REINDEX", "REVOKE", "SECURITY", "TRUNCATE", "UPDATE", "VACUUM", "WITH",
])  # fmt: skip
_CONTROL = frozenset(
    ["ABORT", "BEGIN", "COMMIT", "END", "RELEASE", "ROLLBACK", "SAVEPOINT", "START"]
)

# Quoted text, in the order in which the server's scanner tries them. A backslash escapes in E'…' only.
_LITERALS_AND_COMMENTS = re.compile(
    r"\bE'(?:[^'\\]|\\.|'')*'"
    r"|'(?:[^']|'')*'"
    r'|"(?:[^"]|"")*"'
    r"|(?<![\w$])\$(?P<tag>[A-Za-z_\x80-\uffff][\w\x80-\uffff]*)?\$.*?\$(?(tag)(?P=tag))\$"
    r"|(?P<comment>--[^\n]*|/\*(?:(?!/\*|\*/).)*\*/)",
    re.DOTALL | re.IGNORECASE,
)
_LEFT_OPEN = ("'", '"', "/*", "$$")
_NEEDS_STRIPPING = ("'", '"', "--", "/*", "$", ";")
_FIRST_WORD = re.compile(r"[\s(]*([A-Za-z_]+)")
# A cheap first test: the patterns below can match only if a statement contains one of these.
_SUSPICIOUS_NAMES = (
    "SET_CONFIG",
    "ADVISORY",
    "SETSEED",
    "DBLINK",
    "CURRVAL",
    "LASTVAL",
    "SEARCH_PATH",
)
_STATEFUL_FUNCTION = re.compile(
    r"\b(SET_CONFIG|PG_(?:TRY_)?ADVISORY_LOCK(?:_SHARED)?|PG_ADVISORY_UNLOCK\w*|SETSEED"
    r"|DBLINK_(?:CONNECT|DISCONNECT|OPEN|CLOSE|SEND_QUERY)\w*)\s*\("
)
_AFFINE = re.compile(r"\b(?:CURRVAL|LASTVAL)\s*\(")
_PATH = re.compile(
    r"\bSEARCH_PATH\b|^RESET\s+ALL\b|^SET\s+(?:SESSION\s+)?SCHEMA\b|^DISCARD\s+ALL\b"
)
_LOCKING_READ = re.compile(
    r"\bFOR\s+(?:UPDATE|SHARE|NO\s+KEY|KEY)\b|\bINTO\b|\bNEXTVAL\b|\bSETVAL\b"
)
_TEMPORARY = re.compile(
    r"\bCREATE\s+(?:OR\s+REPLACE\s+)?(?:(?:LOCAL|GLOBAL)\s+)?(?:TEMPORARY|TEMP)\b"
    r"|\bINTO\s+(?:(?:LOCAL|GLOBAL)\s+)?(?:TEMPORARY|TEMP)\b|\bPG_TEMP\b"
)
# Where the text of a statement has no literals and comments any more.
_ALONE = re.compile(
    r"^(?:VACUUM|CLUSTER|CHECKPOINT|CALL|DO|ALTER\s+SYSTEM|COMMIT\s+PREPARED|ROLLBACK\s+PREPARED)\b"
    r"|^(?:CREATE|DROP|ALTER)\s+(?:DATABASE|TABLESPACE|SUBSCRIPTION)\b"
    r"|^(?:CREATE|DROP|REINDEX)\b.*\bCONCURRENTLY\b|^ALTER\b.*\bDETACH\b.*\bCONCURRENTLY\b"
    r"|^REINDEX\s+(?:\(.*?\)\s*)?(?:SCHEMA|DATABASE|SYSTEM)\b",
    re.DOTALL,
)
_BARE = re.compile(r"^(?:LOCK|PREPARE\s+TRANSACTION)\b|^DECLARE\b(?!.*\bWITH\s+HOLD\b)", re.DOTALL)
_SET_STATELESS = re.compile(r"SET\s+(?:LOCAL|CONSTRAINTS)\b")
_SET_TRANSACTION = re.compile(r"SET\s+TRANSACTION\b")
_EXTENSION = re.compile(
    r"\s*CREATE\s+EXTENSION\s+(?:IF\s+NOT\s+EXISTS\s+)?(\"(?:[^\"]|\"\")+\"|\w+)", re.IGNORECASE
)


def classify(sql: str) -> PostgreSQLKind:
    """Return the kind of the statement ``sql``. Results for short statements are cached."""
    return _cached(sql) if len(sql) <= _CACHED_LENGTH else _classify(sql)


def reason(sql: str) -> str:
    """Return a word or two, for logs, that say why the statement ``sql`` keeps its session.

    The text contains no values of ``sql``.

    :param sql: a statement of the kind STATE, PATH or CONTROL.
    """
    bare = _without_literals(sql)
    if bare is None:
        return "text with an open quote"
    upper = bare.upper()
    if function := _STATEFUL_FUNCTION.search(upper):
        return function[1].lower()
    if ";" in bare.rstrip("; \t\r\n"):
        return "several statements"
    word = _FIRST_WORD.match(upper)
    return word[1] if word else "?"


def is_several(sql: str) -> bool:
    """Whether ``sql`` has more than one statement, or leaves doubt about that."""
    if ";" not in sql:
        return False
    bare = _without_literals(sql)
    return bare is None or ";" in bare.rstrip("; \t\r\n")


def extension_name(sql: str) -> str | None:
    """Return the quoted or plain name of the extension that ``sql`` creates without naming a schema.

    None for any other statement.
    """
    match = _EXTENSION.match(sql)
    if match is None or re.search(r"\bSCHEMA\b", sql[match.end() :], re.IGNORECASE):
        return None
    return match[1]


def _without_literals(sql: str) -> str | None:
    """Return ``sql`` without comments, with ``?`` for each literal and each quoted name.

    Return None if the text leaves doubt where literals or comments end.
    """
    bare = sql
    if "/*" in bare:
        # Comments nest. Each pass removes the innermost ones.
        while (shorter := _strip(bare)) != bare and "/*" in shorter:
            bare = shorter
    bare = _strip(bare)
    return None if any(mark in bare for mark in _LEFT_OPEN) else bare.strip()


def _strip(sql: str) -> str:
    return _LITERALS_AND_COMMENTS.sub(lambda match: " " if match["comment"] else "?", sql)


def _classify(sql: str) -> PostgreSQLKind:
    text = sql.strip()
    # Look for savepoints before quoted names are removed: Django quotes the names of savepoints.
    if (savepoint := savepoint_statement(text)) is not None:
        return _SAVEPOINTS[savepoint]
    if any(mark in text for mark in _NEEDS_STRIPPING):
        bare = _without_literals(text)
        if bare is None:
            return PostgreSQLKind.CONTROL
        text = bare
    upper = text.upper().rstrip("; \t\r\n")
    if ";" in upper:
        kinds = [_by_word(part.strip()) for part in upper.split(";") if part.strip()]
        return _of_several(kinds)
    return _by_word(upper)


def _of_several(kinds: list[PostgreSQLKind]) -> PostgreSQLKind:
    """Return the kind of a text that has statements of ``kinds``."""
    if any(PostgreSQLKind.SAVEPOINT <= k <= PostgreSQLKind.RELEASE for k in kinds):
        kinds = [*kinds, PostgreSQLKind.CONTROL]
    strongest = max(kinds, default=PostgreSQLKind.WRITE)
    if strongest is PostgreSQLKind.ALONE:
        # The server refuses such a text, which is a transaction block by itself.
        return PostgreSQLKind.WRITE
    if strongest in (PostgreSQLKind.BARE, PostgreSQLKind.SET_TRANSACTION):
        return PostgreSQLKind.WRITE
    return max(strongest, PostgreSQLKind.WRITE)


def _by_word(upper: str) -> PostgreSQLKind:
    match = _FIRST_WORD.match(upper)
    if match is None:
        return PostgreSQLKind.STATE if upper else PostgreSQLKind.WRITE
    word = match[1]
    if _ALONE.match(upper):
        return PostgreSQLKind.ALONE
    if _BARE.match(upper):
        return PostgreSQLKind.BARE
    if word in _CONTROL:
        return PostgreSQLKind.CONTROL
    if word == "SET":
        if _SET_TRANSACTION.match(upper):
            return PostgreSQLKind.SET_TRANSACTION
        if _SET_STATELESS.match(upper):
            return PostgreSQLKind.WRITE
    if _PATH.search(upper) and word != "SHOW":
        return PostgreSQLKind.PATH
    is_read = word in _READS
    if not is_read and word not in _WRITES and word != "DECLARE":
        return PostgreSQLKind.STATE
    if word == "DECLARE" or _TEMPORARY.search(upper):
        return PostgreSQLKind.STATE
    if any(name in upper for name in _SUSPICIOUS_NAMES):
        if _STATEFUL_FUNCTION.search(upper):
            return PostgreSQLKind.STATE
        if _AFFINE.search(upper):
            return PostgreSQLKind.AFFINE
    if is_read and (word == "EXPLAIN" or _LOCKING_READ.search(upper)):
        # EXPLAIN ANALYZE runs the statement.
        return PostgreSQLKind.WRITE
    return PostgreSQLKind.READ if is_read else PostgreSQLKind.WRITE


_cached = lru_cache(maxsize=_CACHE_SIZE)(_classify)
