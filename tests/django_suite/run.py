"""Runs labels of Django's suite on one side, in a process of their own, and keeps the result.

The name of a result says what it is of. Its file gets this name when the process has come to its
end, so that a killed run leaves no half result behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import json
import os
import platform
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.django_suite import source
from tests.django_suite.backends import Backend, Side
from tests.django_suite.compare import Outcomes, read_outcomes
from tests.services import find_program, keeper
from tests.services.addresses import ServerAddress

_INSIDE = Path(__file__).parent / "inside"
_PROGRESS = 30.0  # seconds between two progress lines
_LOG_LINES = 40
#: Start of the ids that unittest gives to labels which it cannot load.
_NOT_IMPORTED = "unittest.loader._FailedTest."


@dataclass(frozen=True)
class Plan:
    """What all runs have in common."""

    #: The unpacked distribution.
    source: Path
    backend: Backend
    #: None: the backend needs none.
    server: ServerAddress | None
    #: The folder for results and logs.
    folder: Path
    #: Number of processes, as for the option of ``runtests.py``.
    parallel: int = 1
    #: Seconds for each run. A run that takes longer is killed and counts as crashed.
    timeout: float = 3600.0
    #: Lease one of this many sessions at random (our backend only); 0: do not.
    scramble: int = 0
    #: Whether our side reads all models by plans: "used", or "compared" with Django's reads; "": it
    #: does not.
    plans: str = ""
    #: Through which our side reaches the server, if not directly.
    pooler: ServerAddress | None = None


@dataclass(frozen=True)
class Run:
    """The result of one side: of a chunk of labels, or of several."""

    side: Side
    outcomes: Outcomes
    seconds: float
    #: Seconds of processor time, without the server's.
    cpu: float
    #: Why a run itself failed, with the end of its log; empty if all came to their end.
    troubles: tuple[str, ...] = ()
    #: Number of tests whose outcomes an earlier run has left.
    kept: int = 0


class FolderInUse(RuntimeError):
    """Another run is writing its results into the folder."""


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keep other runs out of the folder: two would write into the same file.

    :raises FolderInUse: another run is in it.
    """
    # The kernel releases the lock when this process ends, in whatever way.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise FolderInUse(
                f"Another run writes into {str(folder)!r}. Wait for its end, or give --keep another"
                " folder."
            ) from exc
        yield
    finally:
        os.close(descriptor)


def together(runs: Sequence[Run]) -> Run:
    """Return the runs of one side as one."""
    outcomes = Outcomes()
    for one in runs:
        outcomes.add(one.outcomes)
    return Run(
        runs[0].side,
        outcomes,
        sum(one.seconds for one in runs),
        sum(one.cpu for one in runs),
        tuple(trouble for one in runs for trouble in one.troubles),
        sum(one.kept for one in runs),
    )


def run(plan: Plan, side: Side, labels: Sequence[str], progress: Callable[[str], None]) -> Run:
    """Run the labels to their end, their crash or their timeout, or take the result of an earlier
    run. Failed tests are no trouble of the run."""
    name = result_name(plan, side, labels)
    result = plan.folder / f"{name}.jsonl"
    if result.exists():
        outcomes = read_outcomes(result)
        return Run(side, outcomes, *outcomes.cost, kept=len(outcomes.by_test))
    under_way = result.with_suffix(".part")
    under_way.write_text("")
    log = result.with_suffix(".log")
    command = [
        sys.executable, "runtests.py", "--settings=yardstick_settings", "--noinput",
        f"--parallel={plan.parallel}", "--verbosity=1", *labels,
    ]  # fmt: skip
    began, cpu = time.monotonic(), _cpu_of_children()
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            cwd=plan.source / "tests",
            env=_environment(plan, side, under_way),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=functools.partial(keeper.die_with_parent, signal.SIGTERM),
        )
        try:
            code = _wait(child, plan.timeout, lambda: progress(_state(side, under_way, began)))
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
    seconds, cpu = time.monotonic() - began, _cpu_of_children() - cpu
    outcomes = read_outcomes(under_way)
    if trouble := _trouble(code, plan.timeout, outcomes):
        # The log may be in a folder that is about to be removed.
        tail = os.linesep.join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
        return Run(side, outcomes, seconds, cpu, (f"{name}: {trouble}; {log} ends:\n{tail}",))
    with under_way.open("a") as file:
        file.write(json.dumps(["cost", seconds, cpu]) + "\n")
    under_way.replace(result)
    return Run(side, outcomes, seconds, cpu)


def result_name(plan: Plan, side: Side, labels: Sequence[str]) -> str:
    """Return the name of a result: another one for another version of Django or Python, backend,
    side, list of labels or option, and for our side also for other code of the package."""
    what = [
        platform.python_version(),
        labels,
        plan.parallel,
        _options(plan, side, server=None),
        _digest(_INSIDE),
        _digest(_package()) if side is plan.backend.ours else "",
    ]
    digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:8]
    first = labels[0].replace(os.sep, ".")  # A label may be a path.
    return f"{source.version()}-{plan.backend.name}-{side.name}-{first}-{digest}"


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _options(plan: Plan, side: Side, server: ServerAddress | None) -> dict[str, Any]:
    is_ours = side is plan.backend.ours
    return {
        "databases": plan.backend.databases(side, server),
        "scramble": plan.scramble if is_ours else 0,
        "plans": plan.plans if is_ours else "",
        "pooled": bool(plan.pooler) and is_ours,
    }


def _environment(plan: Plan, side: Side, results: Path) -> dict[str, str]:
    server = plan.pooler if plan.pooler and side is plan.backend.ours else plan.server
    options = {**_options(plan, side, server), "results": str(results)}
    env = {key: value for key, value in os.environ.items() if not key.startswith("DJANGO_")}
    path = [plan.source, _INSIDE, _package_alone(plan.source.parent)]
    env["PYTHONPATH"] = os.pathsep.join(map(str, path))
    # Removed together with the source, as a killed run leaves its files behind.
    env["TMPDIR"] = tempfile.mkdtemp(dir=plan.source.parent)
    env["PYTHONHASHSEED"] = "0"  # the same order of sets on both sides
    env["SHARDED_ORM_YARDSTICK"] = json.dumps(options)
    return env


def _package_alone(folder: Path) -> Path:
    """Return a folder from which only our package can be imported, and nothing else of the
    repository.

    The suite creates projects of its own, for example one named ``testproject``.
    """
    library = folder / "library"
    library.mkdir(exist_ok=True)
    link = library / "sharded_orm"
    if not link.exists():
        link.symlink_to(_package(), target_is_directory=True)
    return library


def _package() -> Path:
    spec = importlib.util.find_spec("sharded_orm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _wait(
    child: subprocess.Popen[bytes], timeout: float, progress: Callable[[], None]
) -> int | None:
    end = time.monotonic() + timeout
    while (left := end - time.monotonic()) > 0:
        try:
            return child.wait(min(_PROGRESS, left))
        except subprocess.TimeoutExpired:
            progress()
    return None


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _state(side: Side, results: Path, began: float) -> str:
    outcomes = read_outcomes(results)
    bad = sum(outcome in ("fail", "error") for outcome in outcomes.by_test.values())
    return (
        f"{side.name}: {len(outcomes.by_test)} tests, {bad} of them failed,"
        f" in {time.monotonic() - began:.0f}s"
    )


def _trouble(code: int | None, timeout: float, outcomes: Outcomes) -> str:
    if outcomes.ended and code in (0, 1):
        # Both sides would fail alike, and so without a difference.
        if missing := [test for test in outcomes.by_test if test.startswith(_NOT_IMPORTED)]:
            return f"the run could not import {missing[0].removeprefix(_NOT_IMPORTED)!r}"
        return "" if outcomes.by_test else "the run ran no test"
    if code is None:
        how = f"took longer than {timeout:g} s and was killed"
    elif code < 0:
        how = f"was ended by signal {-code}"
    else:
        how = f"ended with exit code {code}"
    where = f" in {outcomes.unfinished[-1]}" if outcomes.unfinished else ""
    return f"the run {how}{where}"


def load_time_zones(server: ServerAddress) -> bool:
    """Load the names of time zones into the server; without them tests are skipped.

    Return False if the programs for it are missing.
    """
    zones = Path("/usr/share/zoneinfo")
    try:
        convert = find_program("MariaDB", "mariadb-tzinfo-to-sql", "mysql_tzinfo_to_sql")
        client = find_program("MariaDB", "mariadb", "mysql")
    except RuntimeError:
        return False
    if not zones.is_dir():
        return False
    # It complains about files of the folder that are no zones.
    converted = subprocess.run([convert, str(zones)], capture_output=True, check=True)
    command = [
        client, "--no-defaults", f"--host={server.host}", f"--port={server.port}",
        f"--user={server.user}", "mysql",
    ]  # fmt: skip
    subprocess.run(
        command,
        env={**os.environ, "MYSQL_PWD": server.password},
        input=converted.stdout,
        check=True,
    )
    return True
