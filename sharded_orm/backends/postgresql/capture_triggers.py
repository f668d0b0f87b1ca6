"""SQL for the PostgreSQL triggers that record or refuse changes of a table.

For example, while a key moves to another shard, the triggers record in a journal which of its rows
change. Near the end of the move, the key's *fence* is closed. This is a row in a table: as long as
it says "closed", the triggers refuse changes of the key's rows.

The trigger functions run with the privileges of the account that moves keys. So the application's
account needs no privileges on the tables of fences and journal.
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

#: The name of a setting. While it is "1" in a transaction, the triggers neither refuse nor record
#: its changes. The sessions that copy rows set it.
PASSES: Final = "sharded_orm.passes"
#: The name of a sequence. Its value is the id of the last transaction that has added a fence (a row
#: that makes the triggers refuse writes of a key).
EPOCH: Final = f"{OWN_PREFIX}epoch"
#: The event of the trigger that refuses TRUNCATE.
TRUNCATE: Final = "TRUNCATE"

# Settings that affect how the server writes a value as text. Maps each setting to a pair: the value
# that the triggers use for it, and the types of columns whose text depends on it.
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
    """Yield the SQL statements that create a table's trigger for ``event``, and the function that
    it calls.

    :param event: INSERT, UPDATE or DELETE.
    :param key_of: returns an SQL expression for the shard key of a row. It gets the table, and OLD
        or NEW.
    :param types: names of the types of the primary key's columns, such as "timestamptz".
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
        # A transaction in REPEATABLE READ or stricter has one snapshot for all its statements. If a
        # fence was added after the snapshot, the transaction cannot see the fence. So make it fail.
        f" IF has_snapshot AND NOT pg_visible_in_snapshot((SELECT e.last_value FROM {quote(EPOCH)} e)"
        "::text::xid8, pg_current_snapshot()) THEN"
        f" RAISE {literal(_OLD_SNAPSHOT)} USING ERRCODE = '{SERIALIZATION_FAILURE}'; END IF;"
        f"{_unknown_keys(table, rows, quote)}"
        f" PERFORM pg_advisory_xact_lock_shared(f.gate) FROM {fences} f WHERE f.value = ANY(keys);"
        " IF NOT FOUND THEN RETURN NULL; END IF;"
        # In READ COMMITTED, each statement sees whether the fence is closed now. In a stricter
        # transaction, the snapshot may be older. So the trigger also locks the row of the fence:
        # this fails with a serialization failure if the row has changed since the snapshot.
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
    # With ALWAYS, the trigger also fires in sessions that apply replicated changes.
    yield f"ALTER TABLE {quote(table.name)} ENABLE ALWAYS TRIGGER {name}"


def truncate_statements(table: CapturedTable, schema: str, quote: Quote) -> Iterator[str]:
    """Yield the SQL statements that create a trigger which refuses TRUNCATE of a table. TRUNCATE
    removes rows without calling the triggers for rows, so these could not record the change.
    """
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
    """Return SQL that records changed rows whose shard key cannot be found.

    The key of such a row is in another row, to which a foreign key refers. The other row is missing
    if the transaction has deleted it, or will insert it later. The changed row may belong to any
    key. So the SQL records it for every key that moves now.
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
