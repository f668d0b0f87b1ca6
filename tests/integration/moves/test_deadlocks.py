"""Other writers of the target may cause deadlocks with the mover. The move goes on."""

from __future__ import annotations

import pytest

from tests.integration.imports.site import BACKENDS
from tests.integration.moves.site import MOVER, Site

#: The other session locks rows of two tables in the other order than the mover, in a transaction that
#: has done so much that the server ends that of the mover.
_DEADLOCK = (
    MOVER
    + """
import threading
from django.db import OperationalError
other, observer = ShardSessions("books").capture(1), ShardSessions("books").capture(1)
for capture in (other, observer):
    capture._connection.inc_thread_sharing()
is_postgresql = other._connection.vendor == "postgresql"
SERIES = "generate_series(1, 500) AS series (seq)" if is_postgresql else "seq_1_to_500"
# innodb_trx would not do: the server makes that list anew only if nobody has read it for 0.1 seconds.
WAITS = (
    "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    if is_postgresql
    else "SELECT 1 FROM information_schema.global_status"
    " WHERE variable_name = 'INNODB_ROW_LOCK_CURRENT_WAITS' AND variable_value > 0"
)
order = [table.name for table in tables_of_group("books")]
first, second = sorted((Topic, Book), key=lambda model: order.index(model._meta.db_table))
def lock(model):
    table, pk = model._meta.db_table, model.objects.filter(writer_id=3).order_by("pk")[0].pk
    columns = ", ".join(f.column for f in model._meta.local_concrete_fields if not f.primary_key)
    return {lock}
locks = lock(first), lock(second)
def begin(*ignored):
    if is_postgresql:
        other._rows("SET deadlock_timeout = '100s'")  # The one ends whose time is over first.
    other._rows("BEGIN")
    other._rows(f"INSERT INTO library_topic (id, writer_id, name) SELECT 5000 + seq, 1, 'x' FROM {{SERIES}}")
    other._rows(locks[1])
def wait():
    try:
        other._rows(locks[0])
    finally:
        other._rows("ROLLBACK")
def meet(self, sql, *params):
    global is_met
    if not is_met and sql.startswith({verb!r}) and second._meta.db_table in sql[:30]:
        is_met = True
        thread.start()
        while thread.is_alive() and not observer._rows(WAITS):
            pass
    try:
        return rows(self, sql, *params)
    except OperationalError as error:
        errors.append(str(error).lower())
        raise
def change(*ignored):
    first.objects.filter(writer_id=3).update(**{{"name" if first is Topic else "title": "changed"}})
    second.objects.filter(writer_id=3).update(**{{"name" if second is Topic else "title": "changed"}})
thread, is_met, errors = threading.Thread(target=wait), False, []
rows, RowCopy._rows = RowCopy._rows, meet
{hooks}
report = moves.move_keys("books", [3], 1)
thread.join()
print(report.moved, report.failures, ["deadlock" in error for error in errors])
"""
)
_NEW_ROWS = (
    "INSERT",
    'f"INSERT INTO {table} (id, {columns}) SELECT {pk}, {columns} FROM {table} WHERE writer_id = 1 LIMIT 1"',
)
_CHANGED_ROWS = "DELETE", 'f"SELECT 1 FROM {table} WHERE id = {pk} FOR UPDATE"'
#: When the deadlock happens: how the rows are locked, and what is done before.
MOMENTS = {
    "while rows are published": (_NEW_ROWS, 'before(RowCopy, "publish", begin)'),
    "while changes are followed": (
        _CHANGED_ROWS,
        'after(RowCopy, "publish", begin)\nafter(RowCopy, "publish", change)',
    ),
    "at the switch": (
        _CHANGED_ROWS,
        'before(KeyMover, "_switch_once", begin)\nbefore(KeyMover, "_switch_once", change)',
    ),
}


@pytest.mark.parametrize("site", BACKENDS[1:], indirect=True)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_key_moves_in_spite_of_a_deadlock(site: Site, moment: str) -> None:
    (verb, lock), hooks = MOMENTS[moment]
    said = site.run(_DEADLOCK.format(verb=verb, lock=lock, hooks=hooks))
    assert said.strip() == "{'3': 1} {} [True]"
    assert {shard for shard, count in site.counts().items() if count} == {1}
    changed = site.rows().count("'changed'")
    assert (changed > 0) is (moment != "while rows are published")
