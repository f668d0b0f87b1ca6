"""Compares the two runs: ``python -m tests.django_suite [--all] [LABEL…]``; see the package.

Uses the first server of ``SHARDED_ORM_TEST_MYSQL`` (``python -m tests.services.mariadb --
COMMAND``) or starts a private one. The exit code is 1 if a test passes on stock and not on ours
without being documented, or if our run did not come to its end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.django_suite import report, source
from tests.django_suite.compare import differences, read_allowed
from tests.django_suite.labels import LABELS
from tests.django_suite.run import OURS, STOCK, Plan, load_time_zones, run
from tests.services import ServiceMissing, mariadb, required

_HERE = Path(__file__).parent
_DECISIONS = _HERE.parent.parent / "docs" / "decisions"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.django_suite",
        description="Django's own test suite on our MySQL backend, compared with the stock one.",
    )
    parser.add_argument("labels", nargs="*", metavar="LABEL",
                        help=f"of the suite, or a test (default: {' '.join(LABELS)})")  # fmt: skip
    parser.add_argument("--all", action="store_true", help="every label of the suite")
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="processes")
    parser.add_argument("--scramble", type=int, default=0, metavar="N",
                        help="our pool leases one of N sessions at random")  # fmt: skip
    parser.add_argument("--cache", type=Path, default=source.default_cache(), metavar="FOLDER",
                        help="where the source of Django is kept (default: %(default)s)")  # fmt: skip
    parser.add_argument("--keep", type=Path, metavar="FOLDER",
                        help="keep results and logs here (default: removed)")  # fmt: skip
    parser.add_argument("--timeout", type=float, default=7200.0, metavar="SECONDS",
                        help="of each of the two runs (default: %(default)g)")  # fmt: skip
    options = parser.parse_args(arguments)
    if options.all and options.labels:
        parser.error("either --all or labels")
    return options


def main() -> int:
    options = parse()
    signal.signal(signal.SIGTERM, _interrupt)
    with contextlib.ExitStack() as stack:
        running = mariadb.addresses_from_environment()
        if not running:
            try:
                running = [server.address for server in stack.enter_context(mariadb.servers(1))]
            except ServiceMissing as exc:
                print(exc)
                return 1 if required() else 0
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="django-suite-")))
        if options.keep:
            options.keep.mkdir(parents=True, exist_ok=True)
        plan = Plan(
            source=source.unpack(source.fetch(options.cache), folder),
            server=running[0],
            folder=options.keep.resolve() if options.keep else folder,
            labels=None if options.all else options.labels or LABELS,
            parallel=options.parallel,
            timeout=options.timeout,
            scramble=options.scramble,
        )
        return compare(plan)


def compare(plan: Plan) -> int:
    """Run the suite on both backends, print the report and return the exit code."""
    allowed = read_allowed(_HERE / "exceptions.toml", _DECISIONS)
    began = time.monotonic()

    def progress(text: str) -> None:
        print(f"{time.monotonic() - began:6.0f}s {text}", file=sys.stderr, flush=True)

    if not load_time_zones(plan.server):
        progress("no names of time zones: the tests that need them are skipped")
    stock = run(plan, STOCK, progress)
    ours = run(plan, OURS, progress)
    differing = differences(stock.outcomes, ours.outcomes)
    for line in report.show(stock, ours, differing, allowed):
        print(line)
    for side in (stock, ours):
        if side.trouble and not side.outcomes.by_test:
            # Nothing to compare: the reason is in a log that is about to be removed.
            print(os.linesep.join(side.log.read_text(errors="replace").splitlines()[-40:]))
    lost = any(difference.is_loss and difference.test not in allowed for difference in differing)
    return 1 if lost or stock.trouble or ours.trouble else 0


def _interrupt(signum: int, frame: object) -> None:
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
