"""Compares the two sides: ``python -m tests.django_suite [--backend NAME] [--all] [LABEL…]``.

For MySQL it uses the first server of ``SHARDED_ORM_TEST_MYSQL`` (``python -m
tests.services.mariadb -- COMMAND``) or starts a private one, and alike for PostgreSQL. The exit code is 1 if a test passes
on stock and not on ours without being documented, or if a run did not come to its end.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.django_suite import report, source
from tests.django_suite.backends import BACKENDS, Backend, Side
from tests.django_suite.compare import differences, lost, read_allowed
from tests.django_suite.labels import LABELS, chunks, every_label
from tests.django_suite.run import FolderInUse, Plan, Run, alone, load_time_zones, run, together
from tests.services import ServiceMissing, mariadb, required
from tests.services.addresses import ServerAddress
from tests.services.pgbouncer import poolers

_HERE = Path(__file__).parent
_DECISIONS = _HERE.parent.parent / "docs" / "decisions"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.django_suite",
        description="Django's own test suite on our backend, compared with the stock one.",
    )
    parser.add_argument("labels", nargs="*", metavar="LABEL",
                        help=f"of the suite, or a test (default: {' '.join(LABELS)})")  # fmt: skip
    parser.add_argument("--backend", choices=BACKENDS, default="mysql", help="default: %(default)s")
    parser.add_argument("--all", action="store_true", help="every label of the suite")
    parser.add_argument("--chunk", type=int, default=20, metavar="N",
                        help="labels in a run of the suite (default: %(default)s)")  # fmt: skip
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="processes")
    parser.add_argument("--scramble", type=int, default=0, metavar="N",
                        help="our pool leases one of N sessions at random")  # fmt: skip
    plans = parser.add_mutually_exclusive_group()
    plans.add_argument("--plans", action="store_const", const="used", default="",
                       help="our side reads all models by plans, from their first use on")  # fmt: skip
    plans.add_argument("--compare-plans", action="store_const", const="compared", dest="plans", default="",
                       help="on our side, Django's reads are compared with those of plans")  # fmt: skip
    parser.add_argument(
        "--pgbouncer",
        action="store_true",
        help="PgBouncer in transaction mode between our side and the server",
    )
    parser.add_argument("--cache", type=Path, default=source.default_cache(), metavar="FOLDER",
                        help="where the source of Django is kept (default: %(default)s)")  # fmt: skip
    parser.add_argument("--keep", type=Path, metavar="FOLDER",
                        help="keep results and logs here, and go on with those that are there")  # fmt: skip
    parser.add_argument("--timeout", type=float, default=3600.0, metavar="SECONDS",
                        help="of each chunk on each side (default: %(default)g)")  # fmt: skip
    options = parser.parse_args(arguments)
    if options.all and options.labels:
        parser.error("either --all or labels")
    if options.chunk < 1:
        parser.error(f"--chunk {options.chunk}: a chunk has at least one label")
    if options.scramble and not BACKENDS[options.backend].pooled:
        parser.error(f"--scramble: our {options.backend} backend has no pool; leave it out")
    if options.pgbouncer and not BACKENDS[options.backend].behind_pooler:
        parser.error(f"--pgbouncer: it is no pooler for {options.backend}; leave it out")
    return options


def main() -> int:
    options = parse()
    backend = BACKENDS[options.backend]
    signal.signal(signal.SIGTERM, _interrupt)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="django-suite-")))
        if options.keep:
            options.keep.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(alone(options.keep))
            except FolderInUse as exc:
                print(exc)
                return 1
        try:
            server = stack.enter_context(_server(backend))
            pooler = stack.enter_context(_pooler(server if options.pgbouncer else None))
        except ServiceMissing as exc:
            print(exc)
            return 1 if required() else 0
        plan = Plan(
            source=source.unpack(source.fetch(options.cache), folder),
            backend=backend,
            server=server,
            pooler=pooler,
            folder=options.keep.resolve() if options.keep else folder,
            parallel=options.parallel,
            timeout=options.timeout,
            scramble=options.scramble,
            plans=options.plans,
        )
        labels = every_label(plan.source) if options.all else options.labels or LABELS
        return compare(plan, chunks(labels, options.chunk))


@contextlib.contextmanager
def _server(backend: Backend) -> Iterator[ServerAddress | None]:
    """The server of ``backend``: one that runs already, or a private one. None if it needs none."""
    if backend.service is None:
        yield None
    elif running := backend.service.addresses_from_environment():
        yield running[0]
    else:
        with backend.service.servers(1) as started:
            yield started[0].address


@contextlib.contextmanager
def _pooler(server: Any) -> Iterator[ServerAddress | None]:
    """A PgBouncer in front of ``server``; None if there is none."""
    if server is None:
        yield None
    else:
        with poolers([server]) as started:
            yield started[0].address


def compare(plan: Plan, parts: Sequence[Sequence[str]]) -> int:
    """Run the suite on both sides, chunk by chunk, print the report and return the exit code."""
    allowed = read_allowed(_HERE / "exceptions.toml", _DECISIONS)
    if plan.pooler:
        allowed |= read_allowed(_HERE / "exceptions_pgbouncer.toml", _DECISIONS)
    if plan.plans:
        allowed |= read_allowed(_HERE / "exceptions_plans.toml", _DECISIONS)
    began = time.monotonic()

    def progress(where: str, text: str) -> None:
        print(f"{time.monotonic() - began:6.0f}s {where}: {text}", file=sys.stderr, flush=True)

    if plan.backend.service is mariadb and not load_time_zones(plan.server):
        progress("server", "no names of time zones: the tests that need them are skipped")
    runs: dict[Side, list[Run]] = {plan.backend.stock: [], plan.backend.ours: []}
    for number, labels in enumerate(parts, 1):
        where = f"chunk {number} of {len(parts)}, {labels[0]} to {labels[-1]}"
        for side, done in runs.items():
            done.append(run(plan, side, labels, functools.partial(progress, where)))
            progress(where, report.outcome(done[-1]))
        for difference in lost(
            differences(*(done[-1].outcomes for done in runs.values())), allowed
        ):
            progress(where, f"{difference.test} passes on stock and not on ours")
    stock, ours = map(together, runs.values())
    differing = differences(stock.outcomes, ours.outcomes)
    for line in report.show(stock, ours, differing, allowed):
        print(line)
    return 1 if lost(differing, allowed) or stock.troubles or ours.troubles else 0


def _interrupt(signum: int, frame: object) -> None:
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
