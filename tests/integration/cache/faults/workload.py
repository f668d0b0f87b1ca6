"""Readers and writers that run at the same time: the test's handles of their processes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.integration.cache.faults import readers, writers
from tests.integration.cache.faults.process_setup import OWNERS, ProcessSetup
from tests.patience import PATIENCE
from tests.python_process import CONTEXT


class Member:
    """The handle of one process."""

    def __init__(self, kind: str, name: str, target: Any, arguments: tuple[Any, ...]):
        self.kind, self.name = kind, name
        self.reports, theirs = CONTEXT.Pipe(duplex=False)
        self.process = CONTEXT.Process(target=target, args=(*arguments, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.last: dict[str, Any] = {}
        self.ended = False


class Workload:
    """Starts readers and writers; replaces a writer that has died.

    :param self_kill: a writer kills itself at one of so many points; 0 for never.
    """

    def __init__(
        self, setup: ProcessSetup, readers_: int, writers_: int, self_kill: int = 0
    ) -> None:
        self._setup, self._self_kill = setup, self_kill
        self._stop_readers, self._stop_writers = CONTEXT.Event(), CONTEXT.Event()
        #: The owner whose rows are read most, see readers._choose_owner().
        self.preferred_owner = CONTEXT.Value("i", -1)
        self._changed = threading.Condition()
        #: All processes ever started.
        self.members: list[Member] = []
        #: Number of writers that died.
        self.kills = 0
        self._closed = False
        for _ in range(readers_):
            self._start_reader()
        for _ in range(writers_):
            self._start_writer()

    def _start_reader(self) -> None:
        name = f"reader {len(self.members)} {time.time_ns()}"
        arguments = (self._setup, name, self._stop_readers, self.preferred_owner)
        self._listen_to(Member("reader", name, readers.read, arguments))

    def _start_writer(self) -> None:
        name = f"writer {len(self.members)} {time.time_ns()}"
        arguments = (self._setup, name, self._self_kill, self._stop_writers, self.preferred_owner)
        self._listen_to(Member("writer", name, writers.write, arguments))

    def _listen_to(self, member: Member) -> None:
        with self._changed:
            self.members.append(member)
        # This thread always reads, so that no process has to wait to report.
        threading.Thread(target=self._listen, args=(member,), daemon=True).start()

    def _listen(self, member: Member) -> None:
        while not member.ended:
            report: dict[str, Any] = {}
            try:
                report = member.reports.recv()
            except (EOFError, OSError):  # killed
                report = {**member.last, "ended": True}
            died = report.get("ended") and not report.get("failure")
            again = False
            with self._changed:
                member.last, member.ended = report, bool(report.get("ended"))
                if died and member.kind == "writer" and not self._stop_writers.is_set():
                    self.kills += 1
                    again = not self._closed
                self._changed.notify_all()
            if again:
                self._start_writer()
        member.process.join(PATIENCE)

    # ##### Reports #####

    def of(self, kind: str) -> list[Member]:
        return [member for member in self.members if member.kind == kind]

    def sum(self, kind: str, field: str) -> int:
        return sum(member.last.get(field, 0) for member in self.of(kind))

    def counted(self, field: str) -> int:
        """Return the sum of one of the library's counters over all readers."""
        return sum(member.last.get("counts", {}).get(field, 0) for member in self.of("reader"))

    @property
    def reads(self) -> int:
        return self.sum("reader", "reads")

    @property
    def stale(self) -> list[str]:
        return [wrong for member in self.of("reader") for wrong in member.last.get("stale", ())]

    # ##### Waiting #####

    def wait_for(
        self, what: str, condition: Callable[[], bool], patience: float = PATIENCE
    ) -> None:
        """Return when ``condition`` holds for the last reports. Fail at once if a process fails."""

        def met() -> bool:
            self._check()
            return condition()

        with self._changed:
            in_time = self._changed.wait_for(met, patience)
        assert in_time, f"{what} did not happen: {[member.last for member in self.members]!r}"

    def _check(self) -> None:
        for member in self.members:
            failure = member.last.get("failure")
            assert not failure, f"{member.name}:\n{failure}"
            if member.kind == "reader":
                assert not member.ended or self._stop_readers.is_set(), f"{member.name} has ended"

    def wait_for_rounds(
        self,
        owner: int,
        field: str = "rounds",
        *,
        rounds: int = 1,
        patience: float = PATIENCE,
    ) -> None:
        """Wait until each reader has read rows of ``owner`` in ``rounds`` complete rounds.

        :param field: the rounds to count: ``rounds`` for all, ``hit_rounds`` for those with hits.
        """
        # One more round may have begun before.
        rounds += 1
        goal = {m: m.last.get(field, [0] * len(OWNERS))[owner] + rounds for m in self.of("reader")}
        self.preferred_owner.value = owner
        self.wait_for(
            f"that all readers read owner {owner} ({field})",
            lambda: all(m.last.get(field, [0] * len(OWNERS))[owner] >= n for m, n in goal.items()),
            patience,
        )
        self.preferred_owner.value = -1

    @contextlib.contextmanager
    def no_reads_of(self, owner: int) -> Iterator[None]:
        """Keep readers from reading rows of ``owner`` during the block."""
        self.preferred_owner.value = -2 - owner
        # Wait for the rounds that have begun.
        counts = {m: sum(m.last.get("rounds", ())) + 2 for m in self.of("reader")}
        self.wait_for(
            "that all readers read others",
            lambda: all(sum(m.last.get("rounds", ())) >= count for m, count in counts.items()),
        )
        try:
            yield
        finally:
            self.preferred_owner.value = -1

    def stop_writers(self) -> None:
        self._stop_writers.set()
        self.wait_for(
            "that the writers end", lambda: all(member.ended for member in self.of("writer"))
        )

    def stop_readers(self) -> None:
        self._stop_readers.set()
        self.wait_for(
            "that the readers end", lambda: all(member.ended for member in self.of("reader"))
        )

    def kill_a_writer(self, number: int) -> None:
        """Send SIGKILL to a writer, wherever it is; it is replaced."""
        living = [member for member in self.of("writer") if not member.ended]
        if living:
            living[number % len(living)].process.kill()

    def close(self) -> None:
        self._closed = True
        self._stop_writers.set()
        self._stop_readers.set()
        for member in list(self.members):
            member.process.kill()
        for member in list(self.members):
            member.process.join(PATIENCE)
