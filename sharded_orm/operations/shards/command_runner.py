"""Run a management command once for each of many shards.

Worker processes import this module before they call ``django.setup()``. So it must not import
models.
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

from sharded_orm.operations.exceptions import InvalidShardCommand
from sharded_orm.topology.aliases import ShardedDatabases
from sharded_orm.topology.model import Shard

#: In the arguments of a command, this text is replaced by the alias of each shard.
PLACEHOLDER = "{alias}"


@dataclass(frozen=True)
class ShardCommand:
    """A management command that can run on any shard; :func:`parse` returns it."""

    name: str
    #: The command-line arguments, such as ``--database={alias}``, with :data:`PLACEHOLDER`.
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a management command on one shard.

    :param alias: the shard's alias.
    :param error: why the command failed; None if it succeeded.
    :param output: what the command has written to standard output and standard error.
    :param seconds: how long the command took.
    """

    alias: str
    error: str | None
    output: str
    seconds: float


def parse(text: str) -> ShardCommand:
    """Parse a command line such as ``clearsessions --database {alias}``, without ``manage.py``.

    ``{alias}`` stands for the alias of the shard. If the command has the option ``--database``,
    ``--database {alias}`` may be left out.

    :raises InvalidShardCommand: the text is not a command line; there is no such command; or
        ``text`` lacks ``{alias}``, and either the command has no option ``--database``, or ``text``
        already gives this option a value.
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
    """Run ``command`` on each of ``shards``, and yield each outcome as soon as it is known.

    A failure on one shard does not affect the others. The command's standard input is empty.

    :param parallel: number of worker processes, each of which loads the project once. With 1, the
        command runs in this process on one shard after the other. Threads are not used, because
        most commands are not thread-safe.
    """
    if parallel <= 1:
        for shard in shards:
            yield _run_one(command, shard.alias)
        return
    # Spawn the worker processes. Forked ones would use copies of this process's database
    # connections and locks.
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
    # Ctrl+C reaches all processes. Let only the parent react: it starts no more commands, and those
    # that run in the workers finish.
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
            # Whatever the error on this shard is, the command must still run on the others.
            error = f"{type(exc).__name__}: {exc}"
        finally:
            connections[alias].close()
    return Outcome(alias, error, output.getvalue(), time.monotonic() - started)


@contextmanager
def _capture_output(output: io.StringIO) -> Iterator[None]:
    """Redirect standard output and standard error to ``output``, and make standard input empty."""
    stdin = sys.stdin
    with open(os.devnull) as devnull, redirect_stdout(output), redirect_stderr(output):
        sys.stdin = devnull
        try:
            yield
        finally:
            sys.stdin = stdin


@contextmanager
def _expose_alias(arguments: Sequence[str], alias: str) -> Iterator[None]:
    """A context manager in which Django accepts the shard ``alias`` as value of ``--database``.

    Django accepts only aliases that appear when ``DATABASES`` is iterated. Usually the shards do
    not appear there, because there may be thousands.

    :param arguments: the arguments of the command.
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
