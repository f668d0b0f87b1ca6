"""All routine checks and tests, with the servers they need: ``python -m tests``.

Without arguments (or with just ``--long``) it runs the static checks and all tests: everything on
SQLite (tests of the MySQL backend start from there as well), and the tests marked
``every_backend`` or ``mysql_settings`` under ``tests.settings.mysql``, and a part of those marked
``every_backend`` or ``postgresql_settings`` under ``tests.settings.postgresql``; with ``--long``, all
of these. The tests are cut into lanes, and a few lanes run at a time, each with servers of its own. Short lanes with other versions
of Python, Django and the drivers run beside them, see ``tests.pairs``. With other arguments it passes
them to one pytest.
"""

from __future__ import annotations

import compileall
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from tests import pairs
from tests.services import ServiceMissing, keeper, mariadb, postgresql, required
from tests.services.server import TEMPLATES, run_to_end

NO_TESTS_COLLECTED = 5
# Lanes at a time: many tests wait for processes that they have started.
LANES_AT_A_TIME = (os.cpu_count() or 1) + 3
# Folders of modules that many processes import.
MODULES = ("sharded_orm", "testproject", "tests")
SLOWEST = 10
# Files in memory, and the bytes that must be free there for the databases of all lanes.
MEMORY = Path("/dev/shm")
ROOM = 4 << 30

CHECKS = {
    "ruff check": ["ruff", "check", "."],
    "ruff format": ["ruff", "format", "--check", "."],
    # Its cache forgets imports that were guarded by TYPE_CHECKING once.
    "import contracts": ["lint-imports", "--no-cache"],
    "mypy": ["mypy"],
}


@dataclass(frozen=True)
class Backend:
    """A kind of servers on which lanes run, each with servers of its own.

    :param name: the module with the settings, in each package of settings.
    :param service: its module in ``tests.services``.
    """

    name: str
    service: str

    @property
    def marked(self) -> str:
        """The marks of its tests."""
        return f"every_backend or {self.name}_settings"


MARIADB = Backend("mysql", "mariadb")
POSTGRESQL = Backend("postgresql", "postgresql")


@dataclass(frozen=True)
class Lane:
    """Tests that one pytest runs, one after the other.

    :param paths: where they are; nothing for all that no other lane on SQLite has.
    :param backend: the servers that the lane needs; None for SQLite.
    :param settings: the package with a module of settings for each backend.
    :param is_long: whether the lane runs with ``--long`` only.
    :param plugins: modules that pytest loads as plugins.
    """

    name: str
    paths: Sequence[str] = ()
    backend: Backend | None = None
    settings: str = "tests.settings"
    python: str = sys.executable
    is_long: bool = False
    plugins: Sequence[str] = ()

    def command(self, report: Path, arguments: Sequence[str]) -> list[str]:
        """The command line; the report in JUnit's format goes to ``report``."""
        options = [f"--junitxml={report}", "-o", "tmp_path_retention_policy=failed"]
        options += [f"-p{plugin}" for plugin in self.plugins]
        command = [self.python, "-m", "pytest", *options, *arguments, *self.paths]
        command += [f"--ignore={path}" for path in self.elsewhere()]
        if not self.backend:
            return [*command, f"--ds={self.settings}.sqlite"]
        chosen = [f"--ds={self.settings}.{self.backend.name}", "-m", self.backend.marked]
        own_servers = [self.python, "-m", f"tests.services.{self.backend.service}", "--"]
        return [*own_servers, *command, *chosen]

    def elsewhere(self) -> list[str]:
        """The parts of its paths that another lane on the same backend has."""
        # A lane with plugins repeats tests of other lanes.
        lanes = [lane for lane in LANES if lane.backend is self.backend and not lane.plugins]
        paths = {path for lane in lanes for path in lane.paths}
        inside = tuple(f"{path}/" for path in self.paths) or ("",)
        return sorted(path for path in paths if path.startswith(inside) and path not in self.paths)


#: Tests of each part that a backend may break, about three minutes; the others run with ``--long``.
ON_POSTGRESQL = (
    "tests/integration/migrate/engine/test_ends.py",
    "tests/integration/migrate/engine/test_features.py",
    "tests/integration/migrate/engine/test_schemas.py",
    "tests/integration/objects/test_objects.py",
    "tests/integration/scatter/test_behaviour.py",
    "tests/queries/moves/test_fence.py",
    "tests/queries/test_cached_transactions.py",
    "tests/queries/test_django_features.py",
    "tests/queries/test_invalidation.py",
    "tests/queries/test_one_shard.py",
    "tests/queries/test_packed_ids.py",
    "tests/queries/test_relations.py",
    "tests/queries/test_several_shards.py",
    "tests/queries/test_text_keys.py",
    "tests/queries/test_timestamped_ids.py",
    "tests/admin/test_changing.py",
)

LONG_ON_POSTGRESQL = (
    "tests/contract",
    "tests/integration/cache",
    "tests/integration/fixtures",
    "tests/integration/lookups",
    "tests/integration/migrate",
    "tests/integration/objects",
    "tests/integration/scatter",
    "tests/integration/subqueries",
    "tests/integration/tickets",
    "tests/integration/test_autonomous.py",
    "tests/integration/test_directory.py",
)

# The longest first, so that the last ones to run are short. Lanes that mostly wait are between others.
LANES = (
    Lane("all other tests"),
    Lane("integration on MariaDB", ("tests/integration", "tests/contract"), MARIADB),
    Lane(
        "moves",
        (
            "tests/integration/moves",
            "tests/integration/shard_moves",
            "tests/integration/balancing",
        ),
    ),
    Lane("queries and admin", ("tests/queries", "tests/admin")),
    Lane(
        "migrations, shards and topology",
        (
            "tests/integration/migrate",
            "tests/integration/shards",
            "tests/integration/topology",
        ),
    ),
    Lane("acceptance", ("tests/acceptance",)),
    Lane("queries and admin on MariaDB", ("tests/queries", "tests/admin", "tests/unit"), MARIADB),
    Lane(
        "tickets and pairs",
        ("tests/integration/tickets", "tests/integration/side_switches", "tests/integration/pairs"),
    ),
    Lane("cache", ("tests/integration/cache",)),
    Lane(
        "imports, promotion and growth",
        (
            "tests/integration/imports",
            "tests/integration/promotion",
            "tests/integration/growth",
        ),
    ),
    Lane(
        "unit tests, documentation and test runners",
        (
            "tests/unit",
            "tests/docs",
            "tests/contract",
            "tests/integration/testing_support",
            "tests/integration/storm",
        ),
    ),
    Lane("queries on PostgreSQL", ON_POSTGRESQL, POSTGRESQL),
    Lane("helpdesk on MariaDB", ("tests/helpdesk",), MARIADB, "tests.helpdesk.settings"),
    Lane("helpdesk", ("tests/helpdesk",), settings="tests.helpdesk.settings"),
    Lane(
        "reads and writes without plans",
        (
            "tests/queries",
            "tests/integration/cache",
            "tests/integration/lookups",
            "tests/integration/objects",
            "tests/integration/scatter",
        ),
        is_long=True,
        plugins=("tests.plans_off",),
    ),
    Lane("all queries on PostgreSQL", ("tests/queries",), POSTGRESQL, is_long=True),
    Lane("integration on PostgreSQL", LONG_ON_POSTGRESQL, POSTGRESQL, is_long=True),
    Lane("admin on PostgreSQL", ("tests/admin", "tests/unit"), POSTGRESQL, is_long=True),
    Lane(
        "helpdesk on PostgreSQL",
        ("tests/helpdesk",),
        POSTGRESQL,
        "tests.helpdesk.settings",
        is_long=True,
    ),
)


def version_lanes(*, is_long: bool) -> Iterator[Lane]:
    """Yield a short lane on each backend for each of the other versions.

    Say which are left out.

    :param is_long: whether the lanes are those of the long runs.
    """
    for versions in pairs.ALL:
        executable = versions.executable()
        if executable is None:
            print(
                f"Without Python {versions.python} and {', '.join(versions.requirements)}: there is"
                f" no {versions.folder.name}, which scripts/test makes if it finds that Python.",
                flush=True,
            )
            continue
        name, python = versions.name, str(executable)
        chosen = versions.long if is_long else versions.routine
        yield Lane(name, chosen.on_sqlite, python=python)
        if chosen.on_mariadb:
            yield Lane(f"{name} on MariaDB", chosen.on_mariadb, MARIADB, python=python)
        if chosen.on_postgresql:
            yield Lane(f"{name} on PostgreSQL", chosen.on_postgresql, POSTGRESQL, python=python)


@dataclass
class Outcome:
    """What ran, in numbers. A check counts as one test."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    trouble: list[str] = field(default_factory=list)
    #: The tests that failed, each with its lane.
    failures: list[str] = field(default_factory=list)
    #: Seconds by file of tests.
    seconds: Counter[str] = field(default_factory=Counter)

    def check(self, name: str, code: int) -> None:
        """Count a static check that ended with the exit code ``code``."""
        if code:
            self.failed += 1
            self.trouble.append(name)
        else:
            self.passed += 1

    def pytest(self, name: str, code: int, report: Path) -> None:
        """Count a run of pytest that ended with the exit code ``code``."""
        if code == NO_TESTS_COLLECTED:
            return
        failed = 0
        if report.exists():
            tree = ElementTree.parse(report)
            for suite in tree.iter("testsuite"):
                count = {
                    k: int(suite.get(k, 0)) for k in ("tests", "failures", "errors", "skipped")
                }
                failed += count["failures"] + count["errors"]
                self.skipped += count["skipped"]
                self.passed += count["tests"] - sum(list(count.values())[1:])
            for case in tree.iter("testcase"):
                self.seconds[str(case.get("file"))] += float(case.get("time", 0))
                if case.find("failure") is not None or case.find("error") is not None:
                    self.failures.append(f"{case.get('file')}::{case.get('name')} ({name})")
        # pytest may fail without a failed test: interrupted, wrong usage, internal error.
        self.failed += failed or bool(code)
        if failed or code:
            self.trouble.append(name)

    def slowest(self) -> Iterable[str]:
        """A line for each of the files that took longest."""
        for path, seconds in self.seconds.most_common(SLOWEST):
            yield f"{seconds:7.1f}s {path}"


def heading(text: str) -> None:
    print(f"\n=== {text}", flush=True)


@contextmanager
def folder_for_databases() -> Iterator[Path]:
    """A folder for the temporary files of the tests: in memory, or where that has no room, on disk.

    Most statements of the tests create tables or commit, and a disk takes longer for that than
    the whole rest. A killed server loses nothing that the kernel has.
    """
    has_room = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= ROOM
    where = MEMORY if has_room else None
    with tempfile.TemporaryDirectory(
        prefix="tests-", dir=where, ignore_cleanup_errors=True
    ) as folder:
        # PostgreSQL runs as another user.
        os.chmod(folder, 0o755)
        yield Path(folder)


def write_bytecode() -> None:
    """Compile our modules once.

    Thousands of processes import them. In a fresh clone, or where the environment says that imports
    write no bytecode, each of these processes would spend half of its time on the same compilation.
    """
    for folder in MODULES:
        compileall.compile_dir(folder, quiet=1)


class Runner:
    """Runs commands at the same time; shows what each printed when it has ended.

    :param folder: for the temporary files of the commands.
    """

    def __init__(self, outcome: Outcome, folder: Path) -> None:
        self._outcome = outcome
        templates = folder / "templates"
        templates.mkdir()
        self._environment = {**os.environ, "TMPDIR": str(folder), TEMPLATES: str(templates)}
        # Two lanes collect the same tests, whose assertions pytest compiles in its own way.
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self._lock = threading.Lock()
        self._children: set[subprocess.Popen[bytes]] = set()
        self._stopped = False

    def check(self) -> None:
        """Run the static checks."""
        programs = Path(sys.executable).parent
        for name, (program, *arguments) in CHECKS.items():
            code = self._run(name, [str(programs / program), *arguments])
            with self._lock:
                self._outcome.check(name, code)

    def test(self, lane: Lane, arguments: Sequence[str]) -> None:
        """Run the tests of ``lane``."""
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            code = self._run(lane.name, lane.command(report, arguments))
            with self._lock:
                self._outcome.pytest(lane.name, code, report)

    def _run(self, name: str, command: list[str]) -> int:
        began = time.monotonic()
        with tempfile.TemporaryFile() as output:
            with self._lock:
                if self._stopped:
                    return 1
                # It dies with its thread, which lives as long as the child.
                child = subprocess.Popen(
                    command,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    preexec_fn=functools.partial(keeper.die_with_parent, signal.SIGTERM),
                )
                self._children.add(child)
                print(f"... {name} has begun", flush=True)
            code = child.wait()
            with self._lock:
                self._children.discard(child)
                heading(f"{name} ({time.monotonic() - began:.0f} s)")
                output.seek(0)
                sys.stdout.buffer.write(output.read())
                sys.stdout.flush()
        return code

    def stop(self) -> None:
        """End what still runs; nothing is started any more."""
        with self._lock:
            self._stopped = True
            for child in self._children:
                child.terminate()


def installed_backends() -> Iterator[Backend]:
    """Yield the backends whose servers are installed; where one has to be and is not, an error."""
    for backend, service in ((MARIADB, mariadb), (POSTGRESQL, postgresql)):
        try:
            service.find()
        except ServiceMissing as exc:
            if required():
                raise
            print(f"{exc} Its tests are skipped.", flush=True)
        else:
            yield backend


def run_everything(arguments: Sequence[str]) -> int:
    began = time.monotonic()
    backends = {None, *installed_backends()}
    is_long = "--long" in arguments
    lanes = [
        lane
        for lane in (*LANES, *version_lanes(is_long=is_long))
        if lane.backend in backends and (is_long or not lane.is_long)
    ]
    outcome = Outcome()
    write_bytecode()
    with (
        folder_for_databases() as folder,
        ThreadPoolExecutor(LANES_AT_A_TIME) as executor,
        ExitStack() as on_exit,
    ):
        runner = Runner(outcome, folder)
        on_exit.callback(runner.stop)
        jobs = [executor.submit(runner.check)]
        jobs += [executor.submit(runner.test, lane, arguments) for lane in lanes]
        for job in jobs:
            job.result()
    heading("the slowest files")
    print(*outcome.slowest(), sep="\n")
    heading(f"failed: {', '.join(outcome.trouble)}" if outcome.trouble else "all is well")
    if outcome.failures:
        print(*outcome.failures, sep="\n")
    print(
        f"{outcome.passed} passed, {outcome.failed} failed, {outcome.skipped} skipped"
        f" in {time.monotonic() - began:.0f}s (each of the {len(CHECKS)} checks counts as one)"
    )
    return 1 if outcome.failed else 0


def run_one(arguments: Sequence[str]) -> int:
    """One pytest with ``arguments``, with two servers of each kind that is installed."""
    with ExitStack() as stack:
        environment = dict(os.environ)
        backends = set(installed_backends())
        if MARIADB in backends:
            of_mariadb = stack.enter_context(mariadb.servers(2))
            environment |= mariadb.to_environment([server.address for server in of_mariadb])
        if POSTGRESQL in backends:
            of_postgresql = stack.enter_context(postgresql.servers(2))
            environment |= postgresql.to_environment([server.address for server in of_postgresql])
        return run_to_end([sys.executable, "-m", "pytest", *arguments], environment)


def main(arguments: list[str]) -> int:
    def interrupt(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, interrupt)
    try:
        if arguments and arguments != ["--long"]:
            return run_one(arguments)
        return run_everything(arguments)
    except ServiceMissing as exc:
        print(exc)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
