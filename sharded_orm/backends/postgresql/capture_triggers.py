"""SQL for the PostgreSQL triggers that record or refuse changes of a table.

While a key moves to another shard, the triggers write changed rows to a journal. Near the end, the
*fence* (a row that says which key moves) is closed, and they refuse changes of the key's rows. The
trigger functions run with the privileges of their owner, the account that moves keys. So the
application's account needs none on the tables of fences and journal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from typing import Final

from sharded_orm.backends.change_capture import (
    FENCES,
    JOURNAL,
    CapturedTable,
    rows_of,
    trigger_name,
)
from sharded_orm.backends.fence_messages import SQLSTATE
from sharded_orm.backends.postgresql.sql_quotes import literal
from sharded_orm.backends.snapshot import OWN_PREFIX
from sharded_orm.backends.sqlstate import SERIALIZATION_FAILURE

#: The name of a setting. If a transaction sets it to "1", the triggers let all its changes pass, and
#: record none.
PASSES: Final = "sharded_orm.passes"
#: The sequence whose number is the id of the last transaction that has added a fence, a row that makes
#: the triggers refuse writes of a key.
EPOCH: Final = f"{OWN_PREFIX}epoch"
#: The event of the trigger that refuses TRUNCATE.
TRUNCATE: Final = "TRUNCATE"

# Settings that change the text of values: setting -> the value that the triggers use, and the types
# whose text depends on the setting.
_SETTINGS: Final = {
    "DateStyle": ("'ISO, YMD'", {"date", "timestamp", "timestamptz"}),
    "TimeZone": ("'UTC'", {"timestamptz"}),
    "IntervalStyle": ("'postgres'", {"interval"}),
    "extra_float_digits": ("3", {"float4", "float8"}),
    "bytea_output": ("'hex'", {"bytea"}),
}
_NO_TRUNCATE: Final = (
    "sharded_orm: TRUNCATE is refused while changes of this table are recorded, because no trigger"
    " sees the rows. Use DELETE, or wait until the move or import has ended"
)
_OLD_SNAPSHOT: Final = (
    "sharded_orm: this transaction has begun before its shard keys were watched, and cannot see"
    " whether they move. Run the transaction again"
)

Quote = Callable[[str], str]


def trigger_statements(
    table: CapturedTable,
    event: str,
    schema: str,
    quote: Quote,
    key_of: Callable[[CapturedTable, str], str],
    types: Set[str],
) -> Iterator[str]:
    """Yield the SQL statements that create a table's trigger for ``event``, and the trigger's function.

    :param event: INSERT, UPDATE or DELETE.
    :param key_of: returns SQL for the shard key of a row, whose name is OLD or NEW.
    :param types: the names of the types of the recorded columns.
    """
    name = quote(trigger_name(table.name, event))
    fences, journal = quote(FENCES), quote(JOURNAL)
    rows = rows_of(event)
    keys = ", ".join(f"({key_of(table, row)})::text" for row in rows)
    inserts = "".join(
        f" INSERT INTO {journal} (fence, tbl, pk) SELECT f.id, {literal(table.name)},"
        f" {_pk(table, row, quote)} FROM {fences} f"
        f" WHERE f.value = keys[{number}] AND f.state = 'open';"
        for number, row in enumerate(rows, start=1)
    )
    yield (
        f"CREATE OR REPLACE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER"
        f" SET search_path = pg_catalog, {quote(schema)}, pg_temp{_settings(types)}"
        " AS $sharded_orm$"
        f" DECLARE keys CONSTANT text[] := ARRAY[{keys}];"
        " has_snapshot CONSTANT boolean := current_setting('transaction_isolation')"
        " IN ('repeatable read', 'serializable');"
        " BEGIN"
        # A REPEATABLE READ or stricter transaction has one snapshot for all its statements. It
        # cannot see a fence that was committed after this snapshot. So it must fail if a fence was
        # added since.
        f" IF has_snapshot AND NOT pg_visible_in_snapshot((SELECT e.last_value FROM {quote(EPOCH)} e)"
        "::text::xid8, pg_current_snapshot()) THEN"
        f" RAISE {literal(_OLD_SNAPSHOT)} USING ERRCODE = '{SERIALIZATION_FAILURE}'; END IF;"
        f"{_unknown_keys(table, rows, quote)}"
        f" PERFORM pg_advisory_xact_lock_shared(f.gate) FROM {fences} f WHERE f.value = ANY(keys);"
        " IF NOT FOUND THEN RETURN NULL; END IF;"
        # In READ COMMITTED, each statement sees the present state of the fence. In a stricter
        # transaction, it may see an old one. So the trigger locks the row of the fence FOR SHARE,
        # which fails with a serialization failure if the row has changed since the transaction's
        # snapshot.
        f" IF has_snapshot THEN PERFORM 1 FROM {fences} f WHERE f.value = ANY(keys) FOR SHARE; END IF;"
        f" IF EXISTS (SELECT FROM {fences} f WHERE f.value = ANY(keys) AND f.state = 'closed') THEN"
        f" RAISE {literal(table.refusal)} USING ERRCODE = '{SQLSTATE}'; END IF;"
        f"{inserts} RETURN NULL; END $sharded_orm$"
    )
    yield (
        f"CREATE OR REPLACE TRIGGER {name} AFTER {event} ON {quote(table.name)} FOR EACH ROW"
        f" WHEN (pg_catalog.current_setting('{PASSES}', true) IS DISTINCT FROM '1')"
        f" EXECUTE FUNCTION {name}()"
    )
    # ALWAYS makes the trigger fire even in sessions that apply replicated changes.
    yield f"ALTER TABLE {quote(table.name)} ENABLE ALWAYS TRIGGER {name}"


def truncate_statements(table: CapturedTable, schema: str, quote: Quote) -> Iterator[str]:
    """Yield the SQL statements that create a trigger which refuses TRUNCATE of a table."""
    function, name = quote(f"{OWN_PREFIX}truncate"), quote(trigger_name(table.name, TRUNCATE))
    yield (
        f"CREATE OR REPLACE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql AS $sharded_orm$"
        f" BEGIN RAISE {literal(_NO_TRUNCATE)} USING ERRCODE = '{SQLSTATE}'; END $sharded_orm$"
    )
    yield (
        f"CREATE OR REPLACE TRIGGER {name} BEFORE TRUNCATE ON {quote(table.name)}"
        f" FOR EACH STATEMENT EXECUTE FUNCTION {quote(schema)}.{function}()"
    )
    yield f"ALTER TABLE {quote(table.name)} ENABLE ALWAYS TRIGGER {name}"


def _unknown_keys(table: CapturedTable, rows: tuple[str, ...], quote: Quote) -> str:
    """Return SQL that handles changed rows whose shard key cannot be found.

    The key of such a row is in another row, to which its foreign key refers. The same transaction
    has deleted the other row, or will insert it later. So the changed row is recorded for each key
    that moves.
    """
    if not table.links:
        return ""
    column = quote(table.links[0].column)
    return "".join(
        f" IF keys[{number}] IS NULL AND {row}.{column} IS NOT NULL THEN"
        f" INSERT INTO {quote(JOURNAL)} (fence, tbl, pk) SELECT f.id, {literal(table.name)},"
        f" {_pk(table, row, quote)} FROM {quote(FENCES)} f WHERE f.state = 'open'; END IF;"
        for number, row in enumerate(rows, start=1)
    )


def _pk(table: CapturedTable, row: str, quote: Quote) -> str:
    columns = ", ".join(
        f"encode(convert_to({row}.{quote(pk)}::text, 'UTF8'), 'hex')" for pk in table.pks
    )
    return f"concat_ws(',', {columns})"


def _settings(types: Set[str]) -> str:
    return "".join(
        f" SET {name} = {value}" for name, (value, needing) in _SETTINGS.items() if types & needing
    )
