"""What commands with actions say of errors."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, ClassVar

import pytest
from django.core.management import CommandError, call_command
from django.db import DatabaseError, OperationalError, connections

from sharded_orm import runtime
from sharded_orm.backends.shard_errors import add_shard_note
from sharded_orm.exceptions import ShardedOrmError
from sharded_orm.management.actions import Action, CommandOfActions
from tests.patience import PATIENCE
from tests.python_process import run_python


class _Fail(Action):
    name = "fail"
    help = "Raise an error."
    error: ClassVar[Exception]

    def run(self, command: Any, options: dict[str, Any]) -> None:
        raise self.error


class _Interrupt(Action):
    name = "interrupt"
    help = "Be interrupted by Ctrl-C."

    def run(self, command: Any, options: dict[str, Any]) -> None:
        raise KeyboardInterrupt


class _Command(CommandOfActions):
    requires_system_checks: ClassVar[Any] = []
    actions = (_Fail, _Interrupt)


def message_of(error: Exception) -> str:
    _Fail.error = error
    with pytest.raises(CommandError) as caught:
        call_command(_Command(), "fail")
    assert caught.value.__cause__ is error
    return str(caught.value)


@pytest.mark.django_db(databases="__all__")
def test_an_error_of_a_database_names_the_shard() -> None:
    shard = runtime.shard("photos", 1)
    error = OperationalError(1205, "Lock wait timeout exceeded; try restarting transaction")
    add_shard_note(error, shard)
    assert message_of(error) == (
        "(1205, 'Lock wait timeout exceeded; try restarting transaction'). This was on shard"
        f" 'photos_00001', node {shard.node!r}."
    )


@pytest.mark.django_db(databases="__all__")
def test_an_error_of_a_node_that_does_not_answer_has_the_remedy(tmp_path: Path) -> None:
    shard = runtime.shard("photos", 1)
    missing = {**connections.settings[shard.alias], "NAME": str(tmp_path / "missing" / "file")}
    error = OperationalError("unable to open database file")
    add_shard_note(error, shard)
    connections.settings[shard.alias] = missing
    try:
        assert "See that its server runs" in message_of(error)
    finally:
        del connections.settings[shard.alias]  # Shards are no items; this test has added one.


def test_an_error_without_notes_is_as_it_is() -> None:
    assert message_of(ShardedOrmError("Name a shard.")) == "Name a shard."
    assert message_of(DatabaseError("no such table: x")) == "no such table: x"


def test_an_interrupt_ends_the_process_and_its_script_without_a_traceback() -> None:
    code = """
import django
django.setup()
from tests.unit.management.test_actions import _Command
_Command().run_from_argv(["manage.py", "example", "interrupt"])
"""
    process = run_python(
        ["-c", code],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings.sqlite"},
        timeout=PATIENCE,
        new_interpreter=True,
    )
    # A shell ends its script only if the process was ended by the signal itself.
    assert process.returncode == -signal.SIGINT
    assert process.stderr == (
        "Interrupted. 'manage.py shards status' names an operation that was broken off; the how-to"
        " guide of the command says how to go on.\n"
    )


def test_an_interrupt_reaches_those_who_ask_for_it() -> None:
    with pytest.raises(KeyboardInterrupt):
        _Command().run_from_argv(["manage.py", "example", "interrupt", "--traceback"])
    with pytest.raises(KeyboardInterrupt):
        call_command(_Command(), "interrupt")
