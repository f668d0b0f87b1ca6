"""Move a shard to a replica of its server, which has the rows already.

The mover renames the tables on the source, so that the site can no longer write to them. The
replica repeats the renaming after all earlier writes. So when the tables on the replica are
renamed, the replica has all rows. Then the mover gives the tables their names back, on the replica
only.
"""

from __future__ import annotations

from sharded_orm import runtime
from sharded_orm.backends.schema_move import as_hidden
from sharded_orm.exceptions import MoveFailed
from sharded_orm.operations.shard_moves.replication import Pair, open_pair
from sharded_orm.operations.shard_moves.shard_mover import TRIGGER_PATIENCE, ShardMover
from sharded_orm.operations.shard_moves.table_comparison import TableComparison


class ReplicatedShardMover(ShardMover):
    """Moves one shard to a replica of its server. Used by one thread.

    The mover compares the rows on both servers while the site writes. The site may have changed a
    row on the source just before, so that the row on the target is still the old one. So rows that
    differ are compared again when the tables are renamed and nobody can change them.
    """

    _pair: Pair

    def run(self) -> None:
        with open_pair(self._move.source, self._move.target) as self._pair:
            super().run()

    def _prepare(self) -> None:
        schema = self._source.schema
        self._identities = schema.identities()
        self._tables = {table.name: table for table in schema.tables()}
        self._here, self._there = dict(self._tables), dict(self._tables)
        self._refused = {name: {} for name in self._tables}
        self._layout = schema.layout()
        self._comparison = TableComparison(
            self._source.rows, self._target.rows, self._here, self._there
        )

    def _copy(self) -> None:
        pass  # The servers do.

    def _catch_up(self) -> None:
        """Wait until the new node has replicated everything that the old node has written so far."""
        self._proceed()
        self._wait(self._options.patience)

    def _wait(self, seconds: float) -> None:
        if not self._pair.wait(seconds):
            raise MoveFailed(
                f"{self._move} was not moved: {self._move.target!r} was behind {self._move.source!r}"
                f" for more than {seconds:g} s. A reader there may hold a table."
            )

    def _hide(self) -> float:
        began = super()._hide()
        for name, table in self._tables.items():
            self._here[name] = self._there[name] = as_hidden(table, self._tag)
        return began

    def _copy_the_rest(self) -> None:
        # The tables are renamed now, so statements of the site wait for them. After ``move_wait``
        # seconds, the statements would fail. So do not wait longer than that for the replica.
        self._wait(runtime.config().move_wait)
        self._comparison.compare_open()
        self._raise_if_different("at the switch")
        layouts = (self._source.schema.layout(), self._target.schema.layout())
        if layouts != (self._layout, self._layout):
            raise MoveFailed(
                f"{self._move} was not moved: somebody has altered a table meanwhile, or"
                f" {self._move.target!r} has other tables. Run the command again."
            )

    def settle(self) -> None:
        self._show()
        self._record.keep_until(self._options.keep, replica=self._move.target)

    def undo(self) -> str:
        with self._source.capture.exclusively(TRIGGER_PATIENCE):
            # Wait until no other mover holds this lock. Another mover may have been paused in a
            # block with this lock, and would change something when it continues. If it enters such
            # a block later, it notices that this process has taken over the run, and stops.
            pass
        self._source.schema.show(TRIGGER_PATIENCE)  # The target repeats it.
        return ""
