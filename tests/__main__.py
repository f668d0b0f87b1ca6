"""All routine checks and tests, with the servers they need: ``python -m tests``.

Without arguments (or with just ``--long``) it runs ruff, the import contracts, mypy and
two rounds of pytest: everything on SQLite (tests of the MySQL backend start from there
as well), then the tests marked ``every_backend`` or ``mysql_settings`` under
``tests.settings.mysql``. Beside them run the tests of operations and tickets, which mostly wait
for processes that they start. With other arguments it passes them to one pytest.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from tests.services import ServiceMissing, keeper, required
from tests.services.mariadb import ENVIRONMENT, run_to_end, servers, to_environment

NO_TESTS_COLLECTED = 5

# In a pytest of their own, with servers of their own.
BESIDE = {
    "tests of operations and tickets": [
        "migrate", "shards", "topology", "growth", "promotion", "tickets"
    ]
}  # fmt: skip

CHECKS = {
    "ruff check": ["ruff", "check", "."],
    "ruff format": ["ruff", "format", "--check", "."],
    # Its cache forgets imports that were guarded by TYPE_CHECKING once.
    "import contracts": ["lint-imports", "--no-cache"],
    "mypy": ["mypy"],
}


@dataclass
class Outcome:
    """What ran, in numbers. A check counts as one test."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    trouble: list[str] = field(default_factory=list)

    def check(self, name: str, code: int) -> None:
        if code:
            self.failed += 1
            self.trouble.append(name)
        else:
            self.passed += 1

    def pytest(self, name: str, code: int, report: Path) -> None:
        if code == NO_TESTS_COLLECTED:
            return
        failed = 0
        if report.exists():
            for suite in ElementTree.parse(report).iter("testsuite"):
                count = {
                    k: int(suite.get(k, 0)) for k in ("tests", "failures", "errors", "skipped")
                }
                failed += count["failures"] + count["errors"]
                self.skipped += count["skipped"]
                self.passed += count["tests"] - sum(list(count.values())[1:])
        # pytest may fail without a failed test: interrupted, wrong usage, internal error.
        self.failed += failed or bool(code)
        if failed or code:
            self.trouble.append(name)


def heading(text: str) -> None:
    print(f"\n=== {text}", flush=True)


def run_checks(outcome: Outcome) -> None:
    programs = Path(sys.executable).parent
    for name, (program, *arguments) in CHECKS.items():
        heading(name)
        outcome.check(name, run_to_end([str(programs / program), *arguments], dict(os.environ)))


def pytest_command(report: Path, arguments: list[str]) -> list[str]:
    return [
        sys.executable, "-m", "pytest", "--durations=10", f"--junitxml={report}", *arguments
    ]  # fmt: skip


def run_pytest(outcome: Outcome, name: str, arguments: list[str], env: dict[str, str]) -> None:
    heading(name)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        outcome.pytest(name, run_to_end(pytest_command(report, arguments), env), report)


@contextmanager
def pytest_beside(outcome: Outcome, name: str, arguments: list[str]) -> Iterator[None]:
    """Run a pytest beside what the block does; its output comes at the end."""
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "output", "w+b") as output:
        report = Path(folder) / "report.xml"
        child = subprocess.Popen(
            pytest_command(report, arguments),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=functools.partial(keeper.die_with_parent, signal.SIGTERM),
        )
        try:
            yield
            code = child.wait()
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
            heading(name)
            output.seek(0)
            sys.stdout.buffer.write(output.read())
            sys.stdout.flush()
        outcome.pytest(name, code, report)


def start_servers(stack: ExitStack) -> dict[str, str]:
    """The environment with two MariaDB servers in it; without them where they are missing."""
    try:
        running = stack.enter_context(servers(2))
    except ServiceMissing as exc:
        if required():
            raise
        print(f"{exc} Its tests are skipped.", flush=True)
        return dict(os.environ)
    ports = ", ".join(str(server.address.port) for server in running)
    print(f"private MariaDB servers run on ports {ports}", flush=True)
    return {**os.environ, **to_environment([server.address for server in running])}


def main(arguments: list[str]) -> int:
    def interrupt(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, interrupt)
    with ExitStack() as stack:
        try:
            if arguments and arguments != ["--long"]:
                env = start_servers(stack)
                return run_to_end([sys.executable, "-m", "pytest", *arguments], env)
            return run_everything(stack, arguments)
        except ServiceMissing as exc:
            print(exc)
            return 1


def run_everything(stack: ExitStack, arguments: list[str]) -> int:
    began = time.monotonic()
    outcome = Outcome()
    run_checks(outcome)
    heading("servers")
    env = start_servers(stack)
    with ExitStack() as beside:
        apart = []
        for name, folders in BESIDE.items():
            paths = [f"tests/integration/{folder}" for folder in folders]
            beside.enter_context(pytest_beside(outcome, name, [*arguments, *paths]))
            apart += [f"--ignore={path}" for path in paths]
        run_pytest(outcome, "tests on SQLite", [*arguments, *apart], env)
        if ENVIRONMENT in env:
            again = ["--ds=tests.settings.mysql", "-m", "every_backend or mysql_settings"]
            run_pytest(outcome, "tests on MariaDB", [*arguments, *again], env)
    heading(f"failed: {', '.join(outcome.trouble)}" if outcome.trouble else "all is well")
    print(
        f"{outcome.passed} passed, {outcome.failed} failed, {outcome.skipped} skipped"
        f" in {time.monotonic() - began:.0f}s (each of the {len(CHECKS)} checks counts as one)"
    )
    return 1 if outcome.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
