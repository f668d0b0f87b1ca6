"""Runs Django's suite on one backend, in a process of its own."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.django_suite.compare import Outcomes, read_outcomes
from tests.services import find_program, keeper
from tests.services.mariadb import Address

_INSIDE = Path(__file__).parent / "inside"
_PROGRESS = 30.0  # seconds between two progress lines


@dataclass(frozen=True)
class Backend:
    """One side of the comparison."""

    name: str
    engine: str
    #: Start of its schema names. Equally long on both sides: some tests depend on the lengths.
    prefix: str


STOCK = Backend("stock", "django.db.backends.mysql", "suite_django")
OURS = Backend("ours", "sharded_orm.backends.mysql", "suite_leased")


@dataclass(frozen=True)
class Plan:
    """The options of both runs."""

    #: The unpacked distribution.
    source: Path
    server: Address
    #: The folder for results and logs.
    folder: Path
    #: None: all labels.
    labels: Sequence[str] | None
    #: Number of processes, as for the option of ``runtests.py``.
    parallel: int = 1
    #: Seconds for each run. A run that takes longer is killed and counts as crashed.
    timeout: float = 7200.0
    #: Lease one of this many sessions at random (our backend only); 0: do not.
    scramble: int = 0


@dataclass(frozen=True)
class Run:
    """The result of one run."""

    backend: Backend
    outcomes: Outcomes
    seconds: float
    #: Seconds of processor time, without the server's.
    cpu: float
    #: Why the run itself failed; empty if it came to its end.
    trouble: str
    log: Path


def run(plan: Plan, backend: Backend, progress: Callable[[str], None]) -> Run:
    """Run the suite to its end, its crash or its timeout. Failed tests are no trouble of the
    run."""
    results = plan.folder / f"{backend.name}.jsonl"
    log = plan.folder / f"{backend.name}.log"
    results.unlink(missing_ok=True)
    results.touch()
    command = [
        sys.executable, "runtests.py", "--settings=yardstick_settings", "--noinput",
        f"--parallel={plan.parallel}", "--verbosity=1", *(plan.labels or []),
    ]  # fmt: skip
    began, cpu = time.monotonic(), _cpu_of_children()
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            cwd=plan.source / "tests",
            env=_environment(plan, backend, results),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=functools.partial(keeper.die_with_parent, signal.SIGTERM),
        )
        try:
            code = _wait(child, plan.timeout, lambda: progress(_state(backend, results, began)))
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
    outcomes = read_outcomes(results)
    trouble = _trouble(code, plan.timeout, outcomes)
    seconds, cpu = time.monotonic() - began, _cpu_of_children() - cpu
    return Run(backend, outcomes, seconds, cpu, trouble, log)


def _environment(plan: Plan, backend: Backend, results: Path) -> dict[str, str]:
    options = {
        "engine": backend.engine,
        "prefix": backend.prefix,
        # Strings, as dbshell and others expect of settings.
        "server": {key: str(value) for key, value in plan.server.django().items()},
        "results": str(results),
        "scramble": plan.scramble if backend is OURS else 0,
    }
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
    spec = importlib.util.find_spec("sharded_orm")
    assert spec is not None
    assert spec.origin is not None
    library = folder / "library"
    library.mkdir(exist_ok=True)
    link = library / "sharded_orm"
    if not link.exists():
        link.symlink_to(Path(spec.origin).parent, target_is_directory=True)
    return library


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


def _state(backend: Backend, results: Path, began: float) -> str:
    outcomes = read_outcomes(results)
    bad = sum(outcome in ("fail", "error") for outcome in outcomes.by_test.values())
    return (
        f"{backend.name}: {len(outcomes.by_test)} tests, {bad} of them failed,"
        f" in {time.monotonic() - began:.0f}s"
    )


def _trouble(code: int | None, timeout: float, outcomes: Outcomes) -> str:
    if outcomes.ended and code in (0, 1):
        return ""
    if code is None:
        how = f"took longer than {timeout:g} s and was killed"
    elif code < 0:
        how = f"was ended by signal {-code}"
    else:
        how = f"ended with exit code {code}"
    where = f" in {outcomes.unfinished[-1]}" if outcomes.unfinished else ""
    return f"the run {how}{where}"


def load_time_zones(server: Address) -> bool:
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
