"""Running a management command once for each of many shards.

Importing this module needs no app registry: worker processes import it before the registry is
filled.
"""

from __future__ import annotations

import io
import os
import shlex
import signal
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from multiprocessing import get_context

import django
from django.conf import settings
from django.core.management import (
    BaseCommand,
    CommandError,
    call_command,
    get_commands,
    load_command_class,
)
from django.db import connections

from sharded_orm.exceptions import InvalidShardCommand
from sharded_orm.topology.aliases import ShardedDatabases
from sharded_orm.topology.model import Shard

#: The placeholder for the alias of the shard.
PLACEHOLDER = "{alias}"


@dataclass(frozen=True)
class ShardCommand:
    """A management command for shards; see :func:`parse`."""

    name: str
    #: Arguments as on a command line, with a placeholder for the alias.
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """How the command ended on one shard.

    :param error: the error; None if the command succeeded.
    :param output: the command's output, including errors.
    """

    alias: str
    error: str | None
    output: str
    seconds: float


def parse(text: str) -> ShardCommand:
    """Parse a command line such as ``clearsessions --database {alias}``, without ``manage.py``.

    If the command has the option ``--database``, it may be left out.

    :raises InvalidShardCommand: the command cannot run on a shard.
    """
    try:
        name, *arguments = shlex.split(text) or [""]
    except ValueError as exc:
        raise InvalidShardCommand(f"{text!r} is no command line: {exc}.") from exc
    app = get_commands().get(name)
    if app is None:
        raise InvalidShardCommand(
            f"There is no management command {name!r}; 'manage.py help' lists them."
        )
    if any(PLACEHOLDER in argument for argument in arguments):
        return ShardCommand(name, tuple(arguments))
    command = app if isinstance(app, BaseCommand) else load_command_class(app, name)
    if not _takes_database(command.create_parser("", name)):
        raise InvalidShardCommand(
            f"{name!r} has no option --database: write {PLACEHOLDER} where the alias of the shard"
            " belongs."
        )
    if any(argument.partition("=")[0] == "--database" for argument in arguments):
        raise InvalidShardCommand(
            f"{text!r} names a database itself: leave --database out, or write '--database"
            f" {PLACEHOLDER}'."
        )
    return ShardCommand(name, (f"--database={PLACEHOLDER}", *arguments))


def run(command: ShardCommand, shards: Sequence[Shard], *, parallel: int = 1) -> Iterator[Outcome]:
    """Run ``command`` on each of ``shards``; yields each outcome as soon as it is known.

    A failure on one shard does not affect the others. The command has no input.

    :param parallel: number of processes, each of which loads the project once. 1 runs the command
        in this process, one shard after the other. Threads are not used: commands are not made for
        them.
    """
    if parallel <= 1:
        for shard in shards:
            yield _run_one(command, shard.alias)
        return
    # Spawned: a fork would copy the connections and the locks of this process.
    pool = ProcessPoolExecutor(
        min(parallel, len(shards)), mp_context=get_context("spawn"), initializer=_begin_worker
    )
    try:
        aliases = {pool.submit(_run_one, command, shard.alias): shard.alias for shard in shards}
        for future in as_completed(aliases):
            try:
                yield future.result()
            except BrokenProcessPool:
                yield Outcome(
                    aliases[future],
                    "a worker process died, so it was cut off or not begun",
                    "",
                    0.0,
                )
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_worker() -> None:
    # The parent process stops the work; the command finishes on shards that are under way.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    django.setup()


def _run_one(command: ShardCommand, alias: str) -> Outcome:
    output = io.StringIO()
    arguments = [argument.replace(PLACEHOLDER, alias) for argument in command.arguments]
    started = time.monotonic()
    with _capture_output(output), _expose_alias(arguments, alias):
        try:
            call_command(command.name, *arguments, stdout=output, stderr=output)
            error = None
        except SystemExit as exc:
            error = None if exc.code in (None, 0) else f"it ended with status {exc.code}"
        except EOFError:
            error = "it asked a question, which nobody answers: give it --no-input"
        except CommandError as exc:
            error = str(exc)
        except Exception as exc:
            # Any exception of the command is the outcome of this shard alone.
            error = f"{type(exc).__name__}: {exc}"
        finally:
            connections[alias].close()
    return Outcome(alias, error, output.getvalue(), time.monotonic() - started)


@contextmanager
def _capture_output(output: io.StringIO) -> Iterator[None]:
    """Send direct prints of a command to ``output``, and give it an empty input."""
    stdin = sys.stdin
    with open(os.devnull) as devnull, redirect_stdout(output), redirect_stderr(output):
        sys.stdin = devnull
        try:
            yield
        finally:
            sys.stdin = stdin


@contextmanager
def _expose_alias(arguments: Sequence[str], alias: str) -> Iterator[None]:
    """Let ``--database ALIAS`` in ``arguments`` name the shard.

    Django accepts only aliases that it finds when it iterates over ``DATABASES``.
    """
    databases = settings.DATABASES
    if not isinstance(databases, ShardedDatabases) or dict.__contains__(databases, alias):
        yield
        return
    databases.expose(arguments)
    try:
        yield
    finally:
        databases.pop(alias, None)


def _takes_database(parser: ArgumentParser) -> bool:
    return any("--database" in action.option_strings for action in parser._actions)
