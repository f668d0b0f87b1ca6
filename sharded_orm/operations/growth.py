"""More shards for a group, and which of its ranges take new keys (P10, Y3).

A range is made before it is named: a process that knows of a shard without tables gets
errors when it scatters. And it is named before it is opened: a process that does not know
of a shard yet cannot find keys that others have placed there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from sharded_orm import runtime
from sharded_orm.exceptions import GrowthRefused, TopologyReadOnly
from sharded_orm.operations import topology
from sharded_orm.operations.migrate import MigrateOptions, migration_run
from sharded_orm.operations.nodes import node_connection
from sharded_orm.operations.runs import journal
from sharded_orm.operations.runs.rollout import Stopping
from sharded_orm.operations.selection import Selected
from sharded_orm.operations.shards.misplaced_rows import RowScan
from sharded_orm.routing.base import key_routing_of
from sharded_orm.topology.document import Document
from sharded_orm.topology.model import ShardGroup
from sharded_orm.topology.transitions import KeyRouting

KIND: Final = "grow"
#: Seconds for all processes to use the closed range before it is opened.
PATIENCE = 30.0

Tell = Callable[[str], None]


@dataclass(frozen=True)
class NewRange:
    """A range that a group is to have.

    :param bounds: of a range group with ``BOUNDS``, one lower bound for each new shard.
    """

    group: str
    first: int
    last: int
    primary: str
    replica: str | None = None
    weight: float = 1
    bounds: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.group} {self.first}-{self.last}"

    def entry(self, *, is_open: bool) -> dict[str, Any]:
        """As in ``RANGES``."""
        entry: dict[str, Any] = {"range": [self.first, self.last], "primary": self.primary}
        if self.replica is not None:
            entry["replica"] = self.replica
        if self.weight != 1:
            entry["weight"] = self.weight
        return entry if is_open else {**entry, "open": False}


@dataclass
class GrowthReport:
    """What became of :func:`grow`. ``open`` is None where a range is never open or closed."""

    range: NewRange
    created: bool = False
    named: bool = False
    open: bool | None = False
    #: Of the shards, if they were migrated now.
    migrated: migration_run.MigrationReport | None = None
    problems: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "group": self.range.group,
            "range": [self.range.first, self.range.last],
            "primary": self.range.primary,
            "replica": self.range.replica,
            "created": self.created,
            "named": self.named,
            "open": self.open,
            "problems": self.problems,
        }


def grow(
    name: str,
    count: int,
    *,
    primary: str,
    replica: str | None = None,
    weight: float = 1,
    bounds: Sequence[Any] = (),
    open_it: bool = True,
    progress: migration_run.Progress,
    stopping: Stopping | None = None,
    tell: Tell = lambda line: None,
) -> GrowthReport:
    """Give group ``name`` ``count`` more shards: make them, migrate them, name them, open them.

    May be run again with the same arguments after any end, and goes on. Until it is over, the
    group cannot be grown by others. The calling process should do nothing else: it knows
    the new shards before they are there.

    :param bounds: for a range group with ``BOUNDS``, in order, above every key in use.
    :param open_it: False leaves the range closed.
    :param progress: of migrating.
    :raises GrowthRefused: the group cannot grow, or not like that; nothing was changed.
    :raises TopologyReadOnly: commands cannot change the topology; the message is what to do.
    :raises OperationHeld: somebody else grows the group.
    """
    runtime.refresh()  # Not by a last good copy.
    if runtime.topology() is not runtime.config().topology:
        raise GrowthRefused(
            "This process uses another topology than the configured one, as test runs do: the shards"
            " would be made on the real nodes."
        )
    kind = _growing(name)
    asked = {
        "count": count, "primary": primary, "replica": replica, "weight": weight,
        "bounds": list(bounds),
    }  # fmt: skip
    if count < 1:
        raise GrowthRefused(f"A group grows by one shard or more, not by {count!r}.")
    with journal.running(KIND, name, {**asked, "first": None}) as run:
        if run.arguments["first"] is None:
            begun = False
            group = runtime.group(name)
            new = NewRange(
                name, group.count, group.count + count - 1, primary, replica, weight, tuple(bounds)
            )
        else:
            begun = True
            _same_as_before(name, run.arguments, asked)
            new = NewRange(**{**run.arguments["range"], "bounds": tuple(bounds)})
            tell(f"goes on with run {run.id}: range {new}")
        try:
            report = GrowthRun(run, new, kind, progress, stopping or Stopping(), tell).run_to_end(
                asked, open_it
            )
        except (GrowthRefused, TopologyReadOnly) as exc:
            if not begun and run.arguments["first"] is None:
                run.finish("refused", str(exc))
            raise
        if not report.problems:
            run.finish()
        return report


def give_up(name: str) -> NewRange | None:
    """Forget a growth that was broken off before its range was named; returns the range.

    What was made of its shards stays, and is used when the group grows there again.

    :raises GrowthRefused: the range is named already.
    """
    last = journal.last_run(KIND, name)
    if last is None or last.finished_at is not None:
        return None
    with journal.running(KIND, name, {"first": None}) as run:
        new = None
        if run.arguments.get("first") is not None:
            new = NewRange(**run.arguments["range"])
            if _entry(topology.current(), new) is not None:
                raise GrowthRefused(
                    f"Range {new} is in the topology already and does not go again. Run the same"
                    f" 'shards grow' to finish, or leave it closed: 'manage.py shards close"
                    f" {name} {new.first}-{new.last}'."
                )
        run.finish("given up")
        return new


def set_open(name: str, first: int, last: int, is_open: bool) -> Document:
    """Open a range for new keys, or close it; keys that are there stay (Y3).

    :raises GrowthRefused: there is no such range, or ranges of the group are never closed.
    :raises TopologyError: the topology was not changed.
    """
    return _set(name, first, last, "open", is_open)


def set_weight(name: str, first: int, last: int, weight: float) -> Document:
    """How often a shard of the range is given a new key, beside those of the others.

    :raises GrowthRefused: as :func:`set_open`.
    """
    return _set(name, first, last, "weight", weight)


def _set(name: str, first: int, last: int, key: str, value: Any) -> Document:
    group = runtime.group(name)
    if key_routing_of(group) not in (KeyRouting.PLACED, KeyRouting.EMBEDDED):
        raise GrowthRefused(
            f"Group {name!r} has the strategy {group.strategy!r}, which never chooses a shard for a"
            f" key: {key!r} of a range means nothing there."
        )

    def edit(document: Document) -> Document:
        content = document.content()
        ranges = content["groups"].get(name, {}).get("RANGES", [])
        for each in ranges:
            if tuple(each["range"]) == (first, last):
                each[key] = value
                return Document.from_content(content)
        known = ", ".join("{}-{}".format(*each["range"]) for each in ranges)
        raise GrowthRefused(f"Group {name!r} has no range {first}-{last}; its ranges are {known}.")

    return topology.change(edit, f"{key} of {name} {first}-{last}: {value}")


# ##### Growing #####


def _growing(name: str) -> KeyRouting:
    """:raises GrowthRefused: the number of shards can never change."""
    group = runtime.group(name)
    kind = key_routing_of(group)
    if kind is KeyRouting.COMPUTED:
        raise GrowthRefused(
            f"Group {name!r} cannot grow: its strategy {group.strategy!r} computes the shard of a"
            " key from the number of shards, so nearly every key would be looked for on another"
            " shard. Begin a new group, with a directory, and move the rows."
        )
    return kind


def _same_as_before(name: str, before: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    differs = [key for key, value in asked.items() if before.get(key) != value]
    if differs:
        given = " ".join(f"--{key} {before[key]}" for key in ("count", "primary"))
        raise GrowthRefused(
            f"Group {name!r} was being grown by other arguments ({', '.join(differs)} differ), and"
            f" that was broken off. Finish it with 'manage.py shards grow {name} {given} …', or"
            f" forget it with 'manage.py shards grow {name} --abort'."
        )


def _entry(document: Document, new: NewRange) -> Mapping[str, Any] | None:
    """The new range in a document, if it is there."""
    for each in document.groups.get(new.group, {}).get("RANGES", ()):
        if tuple(each["range"]) == (new.first, new.last):
            found: Mapping[str, Any] = each
            return found
    return None


@contextmanager
def _known_here(document: Document) -> Iterator[None]:
    """Let this process, and no other, use ``document`` for a while.

    :raises InvalidTopology: it must not follow what is in use.
    """
    runtime.swap(runtime.check_document(document).topology)
    try:
        yield
    finally:
        runtime.swap(None)


class GrowthRun:
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

    def run_to_end(self, asked: Mapping[str, Any], open_it: bool) -> GrowthReport:
        new, report = self.new, self.report
        there = _entry(topology.current(), new)
        if there is None:
            before = topology.current()
            document = self._with_range(before).at_version(before.version + 1)
            self._check_writable(document)
            self._refuse_keys_above(document)
            self.run.note(**asked, first=new.first, range=asdict(new))
            if not self._make(document):
                return report
            self._tell(f"names range {new}")
            self.run.check()
            topology.change(self._with_range, f"range {new} on {new.primary}, closed")
        report.created = report.named = True
        if self.kind is KeyRouting.RANGES:
            self._look_for_keys_above()
        elif open_it:
            self._open()
        return report

    def _with_range(self, document: Document) -> Document:
        """The document with the range, closed; the same if it is there."""
        new = self.new
        if _entry(document, new) is not None:
            return document
        content = document.content()
        entry = content["groups"].setdefault(new.group, {})
        ranges = entry.setdefault("RANGES", [])
        count = 1 + max((each["range"][1] for each in ranges), default=-1)
        if count != new.first:
            raise GrowthRefused(
                f"Group {new.group!r} has {count} shards by now, so range {new} does not follow:"
                " somebody else has changed the topology. Repeat the command."
            )
        # Which keys a range group has on its last shard depends on its bounds, never on "open".
        ranges.append(new.entry(is_open=self.kind is KeyRouting.RANGES))
        self._add_bounds(entry)
        return Document.from_content(content)

    def _add_bounds(self, entry: dict[str, Any]) -> None:
        new, group = self.new, runtime.group(self.new.group)
        has_bounds = self.kind is KeyRouting.RANGES and "BOUNDS" in group.strategy_options
        if not has_bounds:
            if new.bounds:
                raise GrowthRefused(f"Group {new.group!r} has no BOUNDS; leave --bounds out.")
            return
        wanted = new.last - new.first + 1
        if len(new.bounds) != wanted:
            raise GrowthRefused(
                f"Group {new.group!r} needs a lower bound for each new shard: --bounds with {wanted}"
                f" values above {group.strategy_options['BOUNDS'][-1]!r}, not {list(new.bounds)!r}."
            )
        options = entry.setdefault("STRATEGY_OPTIONS", {})
        options["BOUNDS"] = [*group.strategy_options["BOUNDS"][: new.first], *new.bounds]

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

    def _make(self, document: Document) -> bool:
        """Create and migrate the shards, which nobody else knows yet."""
        new = self.new
        self._tell(f"makes {new.last - new.first + 1} shards on {new.primary}")
        with _known_here(document):
            group = runtime.group(new.group)
            shards = [group.shard(number) for number in range(new.first, new.last + 1)]
            demand = migration_run.MigrationRequest(MigrateOptions(), create=True)
            made = migration_run.migrate(
                Selected(group, shards), demand, self._progress, self._stopping
            )
        self.report.migrated = made
        if not made.ok:
            self.report.problems.append(
                f"not all shards of range {new} are migrated, so it was not named: mend the cause"
                " and run the same command again"
            )
        return made.ok

    # ##### Bounds #####

    def _refuse_keys_above(self, document: Document) -> None:
        """:raises GrowthRefused: keys that are in use would be looked for on the new shards."""
        if self.kind is not KeyRouting.RANGES:
            return
        with _known_here(document):
            found = self._keys_above()
        if found:
            raise GrowthRefused(
                f"A new bound must lie above every key in use: {'; '.join(found)}. They would not be"
                " found any more. Take a higher bound."
            )

    def _look_for_keys_above(self) -> None:
        """Once more, when the bound is in use: somebody may have written in between."""
        self._wait_until_used()
        self.report.problems += [
            f"{found}: written while the bound was made known. Move those rows"
            for found in self._keys_above()
        ]

    def _keys_above(self) -> list[str]:
        """Keys on the shard that was the last, and belong on new ones; in sentences."""
        group: ShardGroup = runtime.group(self.new.group)
        if "BOUNDS" not in group.strategy_options or self.new.first == 0:
            return []  # With SIZE such keys were refused.
        shard = group.shard(self.new.first - 1)
        rows = RowScan(sample=None)
        with node_connection(shard.node) as wrapper:
            rows.read(wrapper, [shard], lambda: None)
        if rows.errors:
            raise GrowthRefused(
                f"Shard {shard.alias!r} could not be read ({'; '.join(rows.errors.values())}), so"
                " nobody can tell which keys are in use."
            )
        return [
            f"{one.model} has {one.keys} from {one.key_name} = {one.examples[0].key!r} on"
            f" {shard.alias!r}"
            for one in rows.misplaced
        ]

    # ##### Opening #####

    def _open(self) -> None:
        new = self.new
        entry = _entry(topology.current(), new)
        if entry is not None and entry.get("open", True):
            self.report.open = True
            return
        if not self._wait_until_used():
            return
        self._tell(f"opens range {new}")
        self.run.check()
        set_open(new.group, new.first, new.last, True)
        self.report.open = True

    def _wait_until_used(self) -> bool:
        """Whether every process that is connected knows the range."""
        reach = topology.wait_until_used(topology.current().version, PATIENCE)
        if reach is None or not reach.behind:
            return True
        late = ", ".join(f"{one.host} ({one.pid})" for one in reach.behind)
        self.report.problems.append(
            f"range {self.new} stays as it is: after {PATIENCE:g} s these processes do not use it:"
            f" {late}. Run the same command again when they do, or have ended"
        )
        return False


def parse_bounds(name: str, texts: Sequence[str]) -> list[Any]:
    """Bounds from a command line, of the type that the group's bounds have.

    :raises GrowthRefused: they are none of it.
    """
    bounds = runtime.group(name).strategy_options.get("BOUNDS") or [""]
    kind = type(bounds[-1])
    if kind not in (int, str):
        raise GrowthRefused(
            f"Bounds of type {kind.__name__} cannot be given to a command; change BOUNDS where they"
            " stand."
        )
    # int() takes the digits of any script, and not thousands of them.
    number = re.compile(r"-?\d{1,100}", re.ASCII)
    wrong = [text for text in texts if kind is int and not number.fullmatch(text)]
    if wrong:
        raise GrowthRefused(f"Bounds of group {name!r} are whole numbers, not {wrong!r}.")
    return [kind(text) for text in texts]
