"""Make the schema of an empty shard, or check that a shard has the expected schema.

A *script* is SQL that was recorded on an empty copy of the shard. It leads to the expected schema.
"""

from __future__ import annotations

from sharded_orm.backends.snapshot import SchemaSnapshot
from sharded_orm.operations.exceptions import SchemaDiffers
from sharded_orm.operations.migrate.checkpoint import Checkpoint, What
from sharded_orm.operations.migrate.recorded_sql import RecordedScript
from sharded_orm.operations.migrate.shard_session import ShardSession


def build(session: ShardSession, script: RecordedScript, run: int, key: str) -> SchemaSnapshot:
    """Create all tables of an empty shard in their final form. Return the shard's schema.

    The statements of ``script`` may create a table and alter it later. This function creates each
    table as it is after the last statement. The migrations of ``script`` are recorded as applied.
    After an interruption, call the function again: it keeps existing tables.

    :param run: the id of the journal run that stores ``script``.
    :param key: the key of ``script`` in the journal.
    :raises SchemaDiffers: the schema is not the one to which ``script`` must lead.
    """
    checkpoint = Checkpoint(What.BUILD, run, script=key)
    session.begin(checkpoint, "Make all tables")
    session.connection.build_schema(script.promise)
    schema = compare(session, script, checkpoint)
    session.records.record(script.records, backwards=False)
    return schema


def compare(
    session: ShardSession,
    script: RecordedScript,
    checkpoint: Checkpoint,
    before: SchemaSnapshot | None = None,
) -> SchemaSnapshot:
    """Check that the shard has the schema to which ``script`` must lead. Return the shard's schema.

    :param script: recorded SQL that was run on the shard.
    :param checkpoint: the step to write into the journal if the schema differs. It makes the next
        attempt compare the schemas again and, if they are equal, continue.
    :param before: the schema when ``script`` began; None if it was not read. If it is given, and
        ``script`` only alters tables, only these tables are read. This saves time. If the result
        is not the expected schema, all tables are read.
    :raises SchemaDiffers: the shard has another schema.
    """
    tables = script.altered_tables(before) if before is not None else None
    if before is not None and tables is not None:
        schema = session.glance(before, tables)
        if schema.looks_like(script.promise):
            return schema
    schema = session.snapshot()
    differences = schema.differences(script.promise)
    if differences:
        session.begin(checkpoint, "Compare the schema")
        raise SchemaDiffers(
            f"{session.alias} is not as its migrations make it: {'; '.join(differences)}. Somebody"
            " changed it meanwhile, or a server does not do what another one did."
        )
    return schema
