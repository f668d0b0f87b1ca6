"""The conductor of the storm: moves keys and shards, and does harm meanwhile."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.integration.storm.ledger import Ledgers, RowName
from tests.integration.storm.site import FENCE_KEPT, DatabaseServer, StormSite
from tests.patience import PATIENCE
from tests.python_process import PythonProcess
from tests.services.proxy import Proxy

#: Seconds after the return of a server in which connections of before may show that they are lost.
AFTER_OUTAGE = 20.0
#: Why a move may be refused, or may fail without a fault of a server, as a part of the message.
ALLOWED = (
    "fences of moved keys are left on it",
    "there was always a transaction that used it",
    "was broken off. End it by",
)
#: Causes that are the server's.
_CONNECTION = re.compile(
    r"\b(2002|2003|2006|2013|1053|1927)\b|does not answer|Lost connection|gone away|MySQLdb"
    r"|TopologyUnavailable|LeaseLost|taken over|not reach|was broken off|no connection|1317"
    # PostgreSQL: an end of the connection, and a server that starts.
    r"|connection failed|connection unexpectedly|connection is (closed|lost|bad)|terminating connection"
    r"|the database system is|consuming input failed|Connection (reset|refused)"
)


class Conductor:
    """Starts the processes, moves keys and shards one after the other, and does harm.

    :param seed: decides what is done. When it happens depends on the machine.
    :param outages: whether servers are killed, and networks are cut.
    """

    def __init__(
        self,
        site: StormSite,
        folder: Path,
        seed: int,
        *,
        processes: int,
        servers: Sequence[DatabaseServer] = (),
        proxies: Sequence[Proxy] = (),
        outages: bool = False,
    ) -> None:
        self._site, self._folder, self._seed = site, folder, seed
        self._dice = random.Random(seed)
        self._servers, self._proxies, self._outages = servers, proxies, outages
        self._number = 0
        self._applications: list[PythonProcess] = []
        #: Paused processes, and when they go on.
        self._paused: dict[int, float] = {}
        #: The current outage: how it ends, and when.
        self._outage: tuple[Any, float] | None = None
        self._outage_times: list[list[float]] = []
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        for _ in range(processes):
            self._applications.append(self._start())

    def _start(self) -> PythonProcess:
        self._number += 1
        return self._site.application(self._number, self._folder, self._seed)

    def run(self, seconds: float) -> None:
        """Move and do harm for this time, until the last command has ended."""
        end = time.monotonic() + seconds
        self._wait_for_start()
        while time.monotonic() < end and not self.problems:
            self._check_applications()
            self._one_command()

    def _wait_for_start(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while len(list(self._folder.glob("started-*"))) < len(self._applications):
            self._check_applications()
            assert time.monotonic() < deadline and not self.problems, self.problems
            time.sleep(0.05)

    # ##### Commands #####

    def _one_command(self) -> None:
        mode = self._dice.choice(["calm", "kill", "kill", "pause"])
        arguments, repair = self._random_command()
        name = " ".join(arguments[:2])
        began = time.monotonic()
        # Problems have a time as well, so they can be compared.
        print(f"{began:.3f} {mode}: {' '.join(arguments)}")
        mover = self._site.command(*arguments)
        if mode == "kill":
            self._wait(mover, self._dice.uniform(0.3, 4.0))
            if mover.returncode is None:
                mover.kill()
                self.counts[f"{name}: killed"] += 1
        elif mode == "pause":
            self._wait(mover, self._dice.uniform(0.3, 3.0))
            if mover.returncode is None:
                self._pause(mover.pid, self._dice.choice([0.5, 2.0, 5.0]))
                self.counts[f"{name}: paused"] += 1
                if self._dice.random() < 0.5:
                    # Another one takes over, as soon as it may.
                    time.sleep(2.5)
                    self._repair(repair, began, may_be_held=True)
        self._wait(mover, PATIENCE)
        self._resume_all(only=mover.pid)
        out, err = mover.communicate(timeout=PATIENCE)
        if mode == "kill" and mover.returncode == -signal.SIGKILL:
            self._end_outage()
            if self._dice.random() < 0.5:
                self._repair(repair, began)
            else:
                self._judge(arguments, self._site.command(*arguments), began)
            return
        if mover.returncode == 0:
            self.counts[f"{name}: done"] += 1
        elif mode == "pause" or self._may_fail(out + err, began):
            self.counts[f"{name}: not done"] += 1
            self._end_outage()
            self._repair(repair, began)
        else:
            self._problem(f"{arguments} has failed:\n{out}\n{err}")

    def _random_command(self) -> tuple[list[str], list[list[str]]]:
        if self._dice.random() < 0.5:
            keys = [str(n) for n in self._dice.sample(range(1, 9), self._dice.randint(1, 3))]
            to = str(self._dice.randrange(4))
            move = ["keys", "move", "books", *keys, "--to", to, "--keep", "0", "--json"]
            return move, [["keys", "repair", "books", "--json"]]
        group = self._dice.choice(["books", "accounts"])
        shards, node = str(self._dice.randrange(4)), self._dice.choice([*self._site.nodes])
        move = ["shards", "move", group, shards, "--to", node, "--keep", "0", "--json"]
        return move, [["shards", "move", group, "--repair", "--json"]]

    def _repair(self, commands: list[list[str]], began: float, may_be_held: bool = False) -> None:
        for arguments in commands:
            self._judge(arguments, self._site.command(*arguments), began, may_be_held=may_be_held)

    def _judge(
        self, arguments: list[str], process: PythonProcess, began: float, may_be_held: bool = False
    ) -> None:
        """Wait for a command that must succeed, unless a server fails meanwhile."""
        name = " ".join(a for a in arguments[:2] + arguments[3:4] if not a.isdigit())
        harmed = len(self._outage_times)
        self._wait(process, PATIENCE)
        out, err = process.communicate(timeout=PATIENCE)
        ok = process.returncode == 0
        if ok and arguments[0] == "shards" and "--repair" in arguments:
            ok = not json.loads(out)["failures"]
        if ok:
            self.counts[f"{name} after harm: done"] += 1
            return
        text = out + err
        if may_be_held and ("held by" in text or "is under way" in text):
            self.counts[f"{name} after harm: held"] += 1
            return
        if self._is_refused(text):
            self.counts[f"{name} after harm: refused"] += 1
            return
        if len(self._outage_times) > harmed or self._outage is not None:
            self._end_outage()
            self.counts[f"{name} after harm: again"] += 1
            self._judge(arguments, self._site.command(*arguments), time.monotonic())
            return
        self._problem(f"{arguments} has not mended what was left:\n{out}\n{err}")

    def _may_fail(self, text: str, began: float) -> bool:
        if self._is_refused(text):
            return True
        return self._was_outage(began) and bool(_CONNECTION.search(text))

    @staticmethod
    def _is_refused(text: str) -> bool:
        return any(reason in text for reason in ALLOWED)

    def _problem(self, text: str) -> None:
        self.problems.append(f"{time.monotonic():.3f} {text}")

    # ##### Harm #####

    def _wait(self, process: PythonProcess, seconds: float) -> None:
        """Wait for a process, and do harm meanwhile."""
        end = time.monotonic() + seconds
        while process.returncode is None and time.monotonic() < end:
            try:
                process.wait(min(0.25, max(end - time.monotonic(), 0.01)))
            except subprocess.TimeoutExpired:
                self._tick()

    def _tick(self) -> None:
        self._resume_all(until=time.monotonic())
        if self._outage is not None and self._outage[1] < time.monotonic():
            self._end_outage()
        chance = self._dice.random()
        if chance < 0.06:
            index = self._dice.randrange(len(self._applications))
            self._applications[index].kill()
            self._applications[index].communicate(timeout=PATIENCE)
            self._paused.pop(self._applications[index].pid, None)
            self._applications[index] = self._start()
            self.counts["application killed"] += 1
        elif chance < 0.12:
            index = self._dice.randrange(len(self._applications))
            self._pause(self._applications[index].pid, self._dice.choice([0.3, 1.0, 3.0]))
            self.counts["application paused"] += 1
        elif chance < 0.15 and self._outages and self._outage is None:
            self._begin_outage()

    def _begin_outage(self) -> None:
        index = self._dice.randrange(len(self._servers))
        server, proxy = self._servers[index], self._proxies[index]
        kind = self._dice.choice(["kill", "cut", "drop answers", "stall"])
        end, seconds = proxy.forward, self._dice.uniform(0.1, 1.5)
        self._outage_times.append([time.monotonic(), float("inf")])
        if kind == "kill":
            server.kill()
            end = server.start
        elif kind == "cut":
            proxy.cut()
        elif kind == "stall":
            proxy.stall()
        else:
            proxy.drop_answers()
        self.counts[f"server: {kind}"] += 1
        self._outage = (end, time.monotonic() + seconds)

    def _end_outage(self) -> None:
        if self._outage is not None:
            self._outage[0]()
            self._outage = None
            self._outage_times[-1][1] = time.monotonic()

    def _was_outage(self, began: float, ended: float = float("inf")) -> bool:
        return any(
            begin < ended and began < end + AFTER_OUTAGE for begin, end in self._outage_times
        )

    def _pause(self, pid: int, seconds: float) -> None:
        assert seconds < FENCE_KEPT
        try:
            os.kill(pid, signal.SIGSTOP)
        except ProcessLookupError:
            return  # It has just ended.
        self._paused[pid] = time.monotonic() + seconds

    def _resume_all(self, only: int | None = None, until: float = float("inf")) -> None:
        for pid, moment in list(self._paused.items()):
            if moment <= until and only in (None, pid):
                del self._paused[pid]
                try:
                    os.kill(pid, signal.SIGCONT)
                except ProcessLookupError:
                    continue

    def _check_applications(self) -> None:
        for index, application in enumerate(self._applications):
            if application.returncode is None:
                continue
            _, err = application.communicate(timeout=PATIENCE)
            if _CONNECTION.search(err) and self._was_outage(time.monotonic() - AFTER_OUTAGE):
                # It was started during the outage. Later, errors are recorded and end no process.
                self._end_outage()
                self._applications[index] = self._start()
            else:
                self._problem(f"an application has ended ({application.returncode}):\n{err}")

    # ##### The end #####

    def finish(self) -> Ledgers:
        """Stop the processes, and return what they have written and read."""
        self._end_outage()
        self._resume_all()
        (self._folder / "stop").touch()
        for application in self._applications:
            if not application.stdout.closed:
                _, err = application.communicate(timeout=PATIENCE)
                if application.returncode != 0 and not self._was_outage(0.0):
                    self._problem(f"an application has failed ({application.returncode}):\n{err}")
        ledgers = Ledgers(self._folder)
        ledgers.refresh()
        self.problems += ledgers.problems
        self.problems += [
            f"{began:.3f} {kind}: {text}, although no server was down"
            for kind, began, ended, text in ledgers.errors
            if not self._was_outage(began, ended)
        ]
        return ledgers

    def abandon(self) -> None:
        self._end_outage()
        self._resume_all()
        for application in self._applications:
            application.kill()
            if not application.stdout.closed:
                application.communicate(timeout=PATIENCE)


def compare(site: StormSite, ledgers: Ledgers) -> list[str]:
    """Compare the rows on all nodes with the ledgers."""
    places = site.places()
    problems = []
    found: dict[RowName, list[Any]] = {}
    pages: dict[str, list[int]] = {}
    for schema, node, row, value in site.stored():
        group = "accounts" if row.table == "order" else "books"
        shard = int(schema.rpartition("_")[2])
        if group not in schema or row.table == "orphan":
            problems.append(f"{row} on {schema} of {node}")
        elif places[group].get(row.owner) != shard or places["nodes"][group][str(shard)] != node:
            problems.append(
                f"{row} is on {schema} of {node}, belongs to {places[group].get(row.owner)}"
            )
        if row.table == "shared":
            pages.setdefault(row.owner, []).append(value)
        else:
            found.setdefault(row, []).append(value)
    for row in found.keys() | ledgers.rows.keys():
        values = found.get(row, [None])
        state = ledgers.rows.get(row)
        allowed = state.allowed if state else []
        if len(values) != 1 or values[0] not in allowed:
            problems.append(f"{row}: {values}, is {allowed}")
    for changes in ledgers.unfinished():
        # An operation that was not acknowledged was executed as a whole or not at all.
        outcomes = {
            found.get(change.row, [None])[0] == change.new
            for change in changes
            if change.old != change.new
        }
        if len(outcomes) > 1:
            problems.append(f"executed in part: {changes}")
    for key in map(str, range(1, 9)):
        least, most = ledgers.least.get(key, 0), ledgers.most.get(key, 0)
        if len(pages[key]) != 1 or not least <= pages[key][0] <= most:
            problems.append(f"counter of {key}: {pages[key]}, is {least}..{most}")
    return problems
