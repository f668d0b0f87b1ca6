"""Processes that draw ids as fast as they can."""

from __future__ import annotations

import random
import threading
import time
import traceback
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.integration.tickets.faults.project import Project
from tests.patience import PATIENCE
from tests.python_process import CONTEXT

_SECONDS_BETWEEN_REPORTS = 0.02
_ONE_BATCH_IN, _LARGEST_BATCH = 25, 60


@dataclass(frozen=True)
class Report:
    """The results of one process so far."""

    count: int = 0
    #: Highest id of each server.
    highest: tuple[int, ...] = (0, 0)
    #: Seconds of the longest call.
    longest: float = 0.0
    calls: int = 0
    #: When the last completed call began, by the clock that all processes share.
    began: float = 0.0
    failure: str = ""
    ended: bool = False


def _draw(
    project: Project, sequence: str, path: Path, minimum: int, stop: Any, reports: Any
) -> None:
    """Draw ids into a file until ``stop``, and at least ``minimum`` ids."""
    drawn = array("q")
    count = calls = 0
    longest = began = 0.0
    highest = [0] * len(project.aliases)
    dice = random.Random(path.name)
    with path.open("ab", buffering=0) as file:

        def report(**more: Any) -> None:
            for number in drawn:
                place = (number - 1) % len(highest)
                highest[place] = max(highest[place], number)
            # Written before the report: SIGKILL may come between the two.
            file.write(drawn.tobytes())
            del drawn[:]
            reports.send(Report(count, tuple(highest), longest, calls, began, **more))

        try:
            project.configure()
            generator = project.generator()
            reported = time.monotonic()
            while True:
                began = time.monotonic()
                if dice.randrange(_ONE_BATCH_IN):
                    drawn.append(generator.next(sequence))
                    count += 1
                else:
                    size = dice.randint(2, _LARGEST_BATCH)
                    batch = generator.take(sequence, size)
                    assert len({number % len(highest) for number in batch}) == 1, "of one server"
                    assert all(one < later for one, later in pairwise(batch)), "ascending"
                    drawn.extend(batch)
                    count += size
                now = time.monotonic()
                calls += 1
                longest = max(longest, now - began)
                if now - reported >= _SECONDS_BETWEEN_REPORTS:
                    if count >= minimum and stop.is_set():
                        break
                    report()
                    reported = now
            report(ended=True)
        except Exception:
            report(failure=traceback.format_exc(), ended=True)


@dataclass(eq=False)
class Member:
    """The handle of one process of a workload."""

    process: Any
    reports: Any
    path: Path
    last: Report = field(default_factory=Report)


class Workload:
    """Processes that draw ids of one sequence at the same time, each into a file of its own.

    :param minimum: number of ids that each process draws at least; they go on until :meth:`finish`.
    """

    def __init__(
        self, project: Project, sequence: str, folder: Path, processes: int, minimum: int
    ) -> None:
        self._project, self._sequence, self._folder = project, sequence, folder
        self._minimum = minimum
        self._stop = CONTEXT.Event()
        self._changed = threading.Condition()
        #: Includes those that were killed.
        self.all_members: list[Member] = []
        self.members = [self._start() for _ in range(processes)]

    def _start(self) -> Member:
        ours, theirs = CONTEXT.Pipe(duplex=False)
        path = self._folder / f"{self._sequence}-{len(self.all_members)}.ids"
        process = CONTEXT.Process(
            target=_draw,
            args=(self._project, self._sequence, path, self._minimum, self._stop, theirs),
            daemon=True,
        )
        process.start()
        theirs.close()
        member = Member(process, ours, path)
        self.all_members.append(member)
        # This thread always reads, so that no process has to wait to report.
        threading.Thread(target=self._listen, args=(member,), daemon=True).start()
        return member

    def _listen(self, member: Member) -> None:
        ended = False
        while not ended:
            try:
                report = member.reports.recv()
            except (EOFError, OSError):  # killed
                report = replace(member.last, ended=True)
            with self._changed:
                member.last, ended = report, report.ended
                self._changed.notify_all()

    def wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        """Return when ``condition`` holds for the last reports. Fail at once if a process fails."""

        def met() -> bool:
            self._check()
            return condition()

        with self._changed:
            met_in_time = self._changed.wait_for(met, PATIENCE)
        assert met_in_time, f"{what} did not happen: {[member.last for member in self.members]!r}"

    def wait_for_ids_above(
        self, place: int, number: int, quantity: Callable[[Iterable[bool]], bool]
    ) -> None:
        """Wait until ``all`` processes, or ``any``, have an id of a server above ``number``."""
        self.wait_for(
            f"that {quantity.__name__} have an id of server {place + 1} above {number}",
            lambda: quantity(member.last.highest[place] > number for member in self.members),
        )

    def wait_for_new_calls(self) -> None:
        """Wait until each process has completed a call that began after now."""
        now = time.monotonic()
        self.wait_for(
            "a new call of all", lambda: all(member.last.began > now for member in self.members)
        )

    def _check(self) -> None:
        for member in self.members:
            assert not member.last.failure, f"{member.path.name}:\n{member.last.failure}"
            assert not member.last.ended or self._stop.is_set(), f"{member.path.name} has ended"

    def replace_one(self, number: int) -> None:
        """Send SIGKILL to a process in the middle of its work and start another."""
        self.members[number].process.kill()
        self.members[number] = self._start()

    def finish(self) -> DrawnIds:
        """Stop when each process has its minimum, and return the ids of all."""
        self._stop.set()
        self.wait_for("the end", lambda: all(member.last.ended for member in self.members))
        for member in self.all_members:
            member.process.join(PATIENCE)
        return DrawnIds(
            {member.path.stem: _read(member.path) for member in self.all_members},
            {member.path.stem: member.last for member in self.members},
        )

    def __enter__(self) -> Workload:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for member in self.all_members:
            member.process.kill()
            member.process.join(PATIENCE)


def _read(path: Path) -> array[int]:
    ids = array("q")
    ids.frombytes(path.read_bytes())
    return ids


@dataclass(frozen=True)
class DrawnIds:
    """The ids of a workload."""

    ids: dict[str, array[int]]
    #: Without those of killed processes.
    reports: dict[str, Report]

    @property
    def count(self) -> int:
        return sum(map(len, self.ids.values()))

    @property
    def longest(self) -> float:
        """Seconds of the longest call."""
        return max(report.longest for report in self.reports.values())

    def highest(self, place: int) -> int:
        """Return the highest id of one server."""
        return max(report.highest[place] for report in self.reports.values())

    def duplicates(self) -> list[int]:
        """Return the ids that were handed out more than once, to whichever process."""
        seen = array("q")
        for ids in self.ids.values():
            seen.extend(ids)
        in_order = sorted(seen)
        return [one for one, next_one in pairwise(in_order) if one == next_one]
