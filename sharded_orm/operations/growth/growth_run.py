"""One growth of a group: new shards are created and migrated, then published, then opened.

To publish the shards is to add their range to the topology document. To open the range is to let it
take new keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from sharded_orm import runtime
from sharded_orm.exceptions import TopologyReadOnly
from sharded_orm.operations import topology
from sharded_orm.operations.exceptions import GrowthRefused
from sharded_orm.operations.growth.bounds import add_bounds, keys_above
from sharded_orm.operations.growth.new_range import NewRange
from sharded_orm.operations.growth.range_settings import set_open
from sharded_orm.operations.migrate import MigrateOptions, migration_run
from sharded_orm.operations.pairs import replication_check, switch_runner
from sharded_orm.operations.runs import journal
from sharded_orm.operations.runs.rollout import Stopping
from sharded_orm.operations.selection import Selected
from sharded_orm.topology.document import Document
from sharded_orm.topology.transitions import KeyRouting

#: A new range is opened for new keys only when all processes use a topology with the range. This is
#: the largest number of seconds to wait for these processes.
PATIENCE = 30.0

Tell = Callable[[str], None]


@dataclass
class GrowthReport:
    """The outcome of a growth.

    :param created: whether all shards of the range exist and are migrated.
    :param named: whether the topology has the range.
    :param open: whether the range takes new keys. None if each shard of the group has a fixed range
        of keys. Such a group never chooses a shard for a new key, so no range is open or closed.
    :param problems: sentences about what is left to do; empty if the growth is complete.
    """

    range: NewRange
    created: bool = False
    named: bool = False
    open: bool | None = False
    #: The report on the migration of the new shards; None if this call did not migrate them.
    migrated: migration_run.MigrationReport | None = None
    problems: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "group": self.range.group,
            "range": [self.range.first, self.range.last],
            "primary": self.range.primary,
            "replica": self.range.replica,
            "pair": self.range.is_pair,
            "created": self.created,
            "named": self.named,
            "open": self.open,
            "problems": self.problems,
        }


class GrowthRun:
    """Executes the growth of one group by one range.

    :param run: the record of this growth in the journal. This process has the lease of the run, so
        no other process can continue the growth.
    :param new: the range of shards to add.
    :param kind: how the group finds the shard of a key.
    """

    def __init__(
        self,
        run: journal.JournalRun,
        new: NewRange,
        kind: KeyRouting,
        progress: migration_run.Progress,
        stopping: Stopping,
        tell: Tell,
    ) -> None:
        self.run = run
        self.new = new
        self.kind = kind
        self._progress = progress
        self._stopping = stopping
        self._tell = tell
        self.report = GrowthReport(new, open=None if kind is KeyRouting.RANGES else False)

    def run_to_end(self, arguments: Mapping[str, Any], open_it: bool) -> GrowthReport:
        """Execute all phases of the growth that are not done yet. Return the report.

        :param arguments: the command's arguments. The journal stores them, so that a later attempt
            with different arguments can be refused.
        :param open_it: whether to open the range for new keys at the end.
        :raises GrowthRefused: the group cannot grow by this range.
        :raises PairRefused: the two nodes of the range do not replicate each other correctly.
        :raises SwitchRefused: the passive sides of a pair cannot be made to refuse writes.
        :raises TopologyReadOnly: commands cannot change the topology. The message tells the
            operator what to do instead.
        """
        new, report = self.new, self.report
        before = topology.current()
        if not new.entries_in(before):
            if new.is_pair:
                replication_check.require_sound(new.primary, str(new.replica))
            document = self._with_range(before).at_version(before.version + 1)
            self._check_writable(document)
            self._refuse_keys_above(document)
            self.run.note(**arguments, first=new.first, range=asdict(new))
            if not self._create(document):
                return report
            self._tell(f"names range {new}")
            self.run.check()
            topology.change(self._with_range, f"range {new} on {new.primary}, closed")
        report.created = report.named = True
        if new.is_pair:
            switch_runner.fence_passive_sides(new.group, range(new.first, new.last + 1))
        if self.kind is KeyRouting.RANGES:
            self._report_keys_above()
        elif open_it:
            self._open()
        return report

    def _with_range(self, document: Document) -> Document:
        """Return ``document`` with the new range added, or unchanged if it has the range already.

        The range takes no new keys yet, unless the group divides keys by ranges.

        :raises GrowthRefused: the range does not follow the group's last shard, or its bounds do
            not fit.
        """
        new = self.new
        if new.entries_in(document):
            return document
        content = document.content()
        entry = content["groups"].setdefault(new.group, {})
        ranges = entry.setdefault("RANGES", [])
        count = 1 + max((item["range"][1] for item in ranges), default=-1)
        if count != new.first:
            raise GrowthRefused(
                f"Group {new.group!r} has {count} shards by now, so range {new} does not follow:"
                " somebody else has changed the topology. Repeat the command."
            )
        # With "open": False, no new keys are placed on the range yet. Leave "open" out if the group
        # divides keys by ranges, because the bounds alone decide then on which shard a key is.
        ranges += new.entries(is_open=self.kind is KeyRouting.RANGES)
        add_bounds(entry, new, self.kind)
        return Document.from_content(content)

    def _check_writable(self, document: Document) -> None:
        if runtime.source().writable:
            runtime.check_document(document)
            return
        try:
            topology.change(self._with_range)
        except TopologyReadOnly as exc:
            new = self.new
            opening = (
                ""
                if self.kind is KeyRouting.RANGES
                else " When every process has it, take out 'open' and deploy once more."
            )
            raise TopologyReadOnly(
                f"{exc}\nIn a checkout with this change, which serves nobody, run 'manage.py"
                f" migrate_shards --create --group {new.group} --shards {new.first}-{new.last}', and"
                f" deploy it then.{opening}"
            ) from exc

    def _create(self, document: Document) -> bool:
        """Create and migrate the new shards, which no other process knows yet.

        Return True if all of them are migrated. Otherwise add a problem to the report and return
        False.
        """
        new = self.new
        where = f"{new.primary} and {new.replica}" if new.is_pair else new.primary
        self._tell(f"makes {new.last - new.first + 1} shards on {where}")
        with _local_topology(document):
            group = runtime.group(new.group)
            shards = [group.shard(number) for number in range(new.first, new.last + 1)]
            request = migration_run.MigrationRequest(MigrateOptions(), create=True)
            migration = migration_run.migrate(
                Selected(group, shards), request, self._progress, self._stopping
            )
        self.report.migrated = migration
        if not migration.ok:
            self.report.problems.append(
                f"not all shards of range {new} are migrated, so it was not named: mend the cause"
                " and run the same command again"
            )
        return migration.ok

    # ##### Bounds #####

    def _refuse_keys_above(self, document: Document) -> None:
        """Check that no existing row has a key that would belong to the new shards.

        Such a row is on an older shard, but queries would look for it on a new shard.

        :raises GrowthRefused: there is such a row.
        """
        if self.kind is not KeyRouting.RANGES:
            return
        with _local_topology(document):
            keys = keys_above(self.new)
        if keys:
            raise GrowthRefused(
                f"A new bound must lie above every key in use: {'; '.join(keys)}. They would not be"
                " found any more. Take a higher bound."
            )

    def _report_keys_above(self) -> None:
        """Wait until all processes use the lower bounds of the new shards. Then look again for keys
        above these bounds.

        A process that does not use the bounds yet may write a row with such a key to the older
        shard, even after :meth:`_refuse_keys_above` has found none. For such keys, sentences are
        added to the report's problems.
        """
        self._wait_until_used()
        self.report.problems += [
            f"{keys}: written while the bound was made known. Move those rows"
            for keys in keys_above(self.new)
        ]

    # ##### Opening #####

    def _open(self) -> None:
        new = self.new
        closed = [
            entry["range"]
            for entry in new.entries_in(topology.current())
            if not entry.get("open", True)
        ]
        if not closed:
            self.report.open = True
            return
        if not self._wait_until_used():
            return
        self._tell(f"opens range {new}")
        self.run.check()
        for first, last in closed:
            set_open(new.group, first, last, True)
        self.report.open = True

    def _wait_until_used(self) -> bool:
        """Wait until every connected process uses a topology with the new range.

        Return True if all processes use it within :data:`PATIENCE` seconds. Otherwise add a problem
        to the report and return False.
        """
        reach = topology.wait_until_used(topology.current().version, PATIENCE)
        if reach is None or not reach.behind:
            return True
        late = ", ".join(f"{process.host} ({process.pid})" for process in reach.behind)
        self.report.problems.append(
            f"range {self.new} stays as it is: after {PATIENCE:g} s these processes do not use it:"
            f" {late}. Run the same command again when they do, or have ended"
        )
        return False


@contextmanager
def _local_topology(document: Document) -> Iterator[None]:
    """A context manager in whose block this process (and no other) uses the topology ``document``.

    :raises InvalidTopology: ``document`` is not allowed as a successor of the topology in use.
    """
    runtime.swap(runtime.check_document(document).topology)
    try:
        yield
    finally:
        runtime.swap(None)
