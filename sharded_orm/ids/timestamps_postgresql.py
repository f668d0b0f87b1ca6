"""The SQL for timestamped ids that PostgreSQL makes itself (Instagram, I2, I3).

PostgreSQL makes such an id as the default of a column. The functions of this module return SQL
statements and run none. Each table gets an SQL sequence. Each schema (that is, each shard) gets an
SQL function with the number of the shard. Neither contains the schema's name, so the schema may be
renamed, dumped and moved.

The function that Instagram published uses ``nextval % 1024`` as the last bits of an id. It repeats
ids if the clock is set back, or if other sessions draw 1024 numbers while one session has called
``nextval`` but has not read the clock yet. In a test, bulk inserts of four sessions repeated an id
within a second.

Here the SQL sequence stores both the time and the sequence number of the last id, and one session
at a time advances it. So the ids of a table always grow, and no id is repeated. If the sequence
numbers of a millisecond are used up, the session waits for the next millisecond. If the clock is
set back, new ids continue after the last id. This has a price: a call takes 5 microseconds instead
of 1, and a table gets at most some 50,000 rows a second.
"""

from __future__ import annotations

import hashlib

from sharded_orm.ids.layout import TIMESTAMPED, TimestampedLayout

#: The names of the SQL functions begin with this text.
FUNCTION_PREFIX = "sharded_orm_next_id_"
# PostgreSQL's limit for the length of a name, in bytes.
_MAX_IDENTIFIER = 63
#: A session holds an advisory lock while it advances an SQL sequence. The key of the lock has two
#: halves: this number, and the oid of the sequence.
_LOCK = 0x5348_4F52

_FUNCTION = """\
CREATE OR REPLACE FUNCTION {function}(counter regclass) RETURNS bigint
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $function$
DECLARE
  shard CONSTANT bigint := {shard};
  ms bigint;
  latest bigint;  -- milliseconds and number in one
BEGIN
  -- The lock must not last until the transaction ends, or others would wait that long. So it
  -- is taken in this block, which is always rolled back, and which releases it. The effect of
  -- setval stays. Functions are called in expressions, because PERFORM would run a query for each.
  BEGIN
    IF pg_advisory_xact_lock({lock}, counter::oid::integer) IS NULL THEN END IF;
    LOOP
      ms := floor(date_part('epoch', clock_timestamp()) * 1000)::bigint - ({epoch});
      latest := greatest(ms << {sequence_bits}, coalesce(pg_sequence_last_value(counter), 0) + 1);
      -- If the last number of this millisecond is taken, wait for the next. After a step back of
      -- the clock, which may be by hours, there is no wait: ids go on from the last.
      EXIT WHEN latest <> (ms + 1) << {sequence_bits};
      PERFORM pg_sleep(0.0002);
    END LOOP;
    IF ms < 0 THEN
      RAISE 'the clock is % ms before the epoch of the ids', -ms
        USING ERRCODE = 'numeric_value_out_of_range', HINT = 'Set the clock.';
    END IF;
    IF latest >> {sequence_bits} > {last} THEN
      RAISE '% ms after the epoch do not fit into an id: they end at {last}',
        latest >> {sequence_bits}
        USING ERRCODE = 'numeric_value_out_of_range',
          HINT = 'Begin a new column with a later epoch.';
    END IF;
    latest := setval(counter, latest);
    RAISE SQLSTATE 'MADE0';
  EXCEPTION WHEN SQLSTATE 'MADE0' THEN
  END;
  RETURN (latest >> {sequence_bits} << {time_shift})
    | (shard << {sequence_bits})
    | (latest & {last_number});
END
$function$"""


def function_name(layout: TimestampedLayout = TIMESTAMPED) -> str:
    """Return the name that the SQL function of ``layout`` has in every schema."""
    return (
        f"{FUNCTION_PREFIX}{layout.epoch_milliseconds}_{layout.time_bits}"
        f"_{layout.shard_bits}_{layout.sequence_bits}"
    )


def create_function(schema: str, shard: int, layout: TimestampedLayout = TIMESTAMPED) -> str:
    """Return the statement that creates or replaces the SQL function of ``layout`` in ``schema``.

    :param shard: the number of the shard, which all ids of this schema contain.
    :raises InvalidID: ``shard`` does not fit into the layout.
    """
    layout.pack(0, shard, 0)
    return _FUNCTION.format(
        function=_qualified(schema, function_name(layout)),
        shard=shard,
        epoch=layout.epoch_milliseconds,
        last=layout.last_millisecond,
        last_number=(1 << layout.sequence_bits) - 1,
        sequence_bits=layout.sequence_bits,
        time_shift=layout.time_shift,
        lock=_LOCK,
    )


def create_sequence(schema: str, table: str, column: str) -> list[str]:
    """Return statements that create an SQL sequence, in which the last id of ``column`` is stored.

    PostgreSQL drops the sequence together with the column. Database roles that insert rows need the
    UPDATE privilege on the sequence.
    """
    sequence = _qualified(schema, _sequence_name(table, column))
    return [
        f"CREATE SEQUENCE IF NOT EXISTS {sequence} AS bigint",
        f"ALTER SEQUENCE {sequence} OWNED BY {_qualified(schema, table)}.{_quoted(column)}",
    ]


def set_default(
    schema: str, table: str, column: str, layout: TimestampedLayout = TIMESTAMPED
) -> str:
    """Return the statement that makes a new id of ``layout`` the default value of ``column``.

    The ids come from the function that :func:`create_function` has created. The statement locks the
    table briefly.
    """
    sequence = _qualified(schema, _sequence_name(table, column)).replace("'", "''")
    return (
        f"ALTER TABLE {_qualified(schema, table)} ALTER COLUMN {_quoted(column)} SET DEFAULT"
        f" {_qualified(schema, function_name(layout))}('{sequence}'::regclass)"
    )


def _sequence_name(table: str, column: str) -> str:
    name = f"{table}_{column}_last"
    if len(name.encode()) <= _MAX_IDENTIFIER:
        return name
    digest = hashlib.sha256(f"{table}.{column}".encode()).hexdigest()[:16]
    return f"sharded_orm_{digest}_last"


def _quoted(name: str) -> str:
    return '"{}"'.format(name.replace('"', '""'))


def _qualified(schema: str, name: str) -> str:
    return f"{_quoted(schema)}.{_quoted(name)}"
