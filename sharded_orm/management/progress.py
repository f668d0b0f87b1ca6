"""Shows the progress of a long command: a bar if the output is a terminal, otherwise lines of text."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from django.core.management import BaseCommand

from sharded_orm.operations.migrate.migration_run import Failure
from sharded_orm.operations.selection import spans_text

# If no bar is shown, a line about the progress is printed at intervals of this number of seconds.
_INTERVAL = 10.0
# If a list of shard numbers such as "0-7,12" has more characters than this, only the number of
# shards is printed.
_LONGEST_NUMBERS = 120


class ShardProgress:
    """Shows the progress of a command that works on many shards.

    Writes to standard error, because standard output is for the result. Each failure is reported at
    once, in one line. The bar needs tqdm (the extra ``progress``); without tqdm, lines are printed.

    :param verbosity: 0 shows only failures; 1 adds a bar, or a line every 10 seconds; 2 adds a line
        per shard instead.
    :param bar: whether a progress bar may be shown. If False, lines are printed.
    :param unit: the plural name of the things that are counted, such as "shards".
    """

    def __init__(
        self, command: BaseCommand, verbosity: int, *, bar: bool = True, unit: str = "shards"
    ) -> None:
        self._command = command
        self._verbosity = verbosity
        self._unit = unit
        self._uses_bar = bar and verbosity == 1 and command.stderr.isatty()
        self._bar: Any = None
        self._total = self._done = self._failed = 0
        self._group = ""
        self._reported_at = 0.0

    def resume(self, group: str, run: int, done: Sequence[int], left: int) -> None:
        """Write that an interrupted migration continues.

        :param run: the number of the run, that is, of the interrupted migration.
        :param done: the numbers of the shards that it had migrated before the interruption.
        :param left: how many shards it still has to migrate.
        """
        if not self._verbosity:
            return
        numbers = spans_text(done)
        if len(done) < 2:
            migrated = f"shard {numbers} is" if done else "no shard is"
        elif len(numbers) > _LONGEST_NUMBERS:
            migrated = f"{len(done)} shards are"
        else:
            migrated = f"shards {numbers} are"
        rest = "1 is left" if left == 1 else f"{left} are left"
        self._write(f"{group}: run {run} continues: {migrated} migrated already, {rest}.")

    def begin(self, group: str, total: int) -> None:
        self._group, self._total, self._done, self._failed = group, total, 0, 0
        self._reported_at = time.monotonic()
        if self._uses_bar:
            try:
                from tqdm import tqdm
            except ImportError:
                self._uses_bar = False
            else:
                self._bar = tqdm(total=total, desc=group, unit=f" {self._unit}", file=sys.stderr)

    def done(self, alias: str, what: str = "migrated") -> None:
        self._done += 1
        if self._verbosity > 1:
            self._write(f"{alias}: {what} ({self._done + self._failed} of {self._total})")
        self._advance()

    def failed(self, failure: Failure) -> None:
        self._fail(failure_line(failure))

    def unit_failed(self, description: str, error: str) -> None:
        """Report a failure of something that is not a shard, such as a shard key that is moved."""
        self._fail(f"{description}: failed: {error}")

    def _fail(self, line: str) -> None:
        self._failed += 1
        self._write(self._command.style.ERROR(line))
        self._advance()

    def end(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        self._total = 0

    def _advance(self) -> None:
        if self._bar is not None:
            self._bar.update()
        elif (
            self._total
            and self._verbosity == 1
            and time.monotonic() - self._reported_at >= _INTERVAL
        ):
            self._reported_at = time.monotonic()
            self._write(
                f"{self._group}: {self._done + self._failed} of {self._total} {self._unit},"
                f" {self._failed} failed"
            )

    def _write(self, text: str) -> None:
        if self._bar is not None:
            self._bar.clear()
        # Pass a style: by default, Django's stderr prints every line in red, like an error.
        self._command.stderr.write(text, style_func=str)
        if self._bar is not None:
            self._bar.refresh()


def failure_line(failure: Failure) -> str:
    """Return a line about a failed shard, such as ``photos_00003: failed at photos.0002_title:
    OperationalError: …``.
    """
    where = f" at {failure.migration}" if failure.migration else ""
    return f"{failure.alias}: {failure.state}{where}: {failure.error}"
