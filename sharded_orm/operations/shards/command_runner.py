"""Any management command, once for each of many shards.

Nothing here needs the app registry at import: worker processes come here before it is filled.
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

#: Stands for the alias of the shard.
PLACEHOLDER = "{alias}"


@dataclass(frozen=True)
class ShardCommand:
    """A management command to be run on shards; see :func:`parse`."""

    name: str
    #: As on a command line, with a placeholder for the alias.
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """How the command ended on one shard.

    :param error: None if it succeeded.
    :param output: what it printed, errors included.
    """

    alias: str
    error: str | None
    output: str
    seconds: float


def parse(text: str) -> ShardCommand:
    """A command line such as ``clearsessions --database {alias}``, without ``manage.py``.

    A command that has the option ``--database`` need not be given it.

    :raises InvalidShardCommand: it cannot be run on a shard.
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
    """Run ``command`` on each of ``shards``; yields how it ended, as each is done.

    What fails on one shard does not keep the others back. It can ask nobody anything.

    :param parallel: 1 runs one after the other in this process; more, in so many processes, each of
        which loads the project once. Commands are not made for threads.
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
    # The process that waits stops the work; a shard that is begun is brought to its end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    django.setup()


def _run_one(command: ShardCommand, alias: str) -> Outcome:
    output = io.StringIO()
    arguments = [argument.replace(PLACEHOLDER, alias) for argument in command.arguments]
    started = time.monotonic()
    with _captured(output), _exposed(arguments, alias):
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
            # Whatever a command of somebody else raises is the outcome of this shard only.
            error = f"{type(exc).__name__}: {exc}"
        finally:
            connections[alias].close()
    return Outcome(alias, error, output.getvalue(), time.monotonic() - started)


@contextmanager
def _captured(output: io.StringIO) -> Iterator[None]:
    """What commands print without Django's streams goes to ``output``; there is no input."""
    stdin = sys.stdin
    with open(os.devnull) as devnull, redirect_stdout(output), redirect_stderr(output):
        sys.stdin = devnull
        try:
            yield
        finally:
            sys.stdin = stdin


@contextmanager
def _exposed(arguments: Sequence[str], alias: str) -> Iterator[None]:
    """``--database ALIAS`` among ``arguments`` may name the shard: Django lets one choose among
    the aliases that it iterates over."""
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
