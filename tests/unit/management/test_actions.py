"""What commands with actions say of errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from django.core.management import CommandError, call_command
from django.db import DatabaseError, OperationalError, connections

from sharded_orm import runtime
from sharded_orm.backends.shard_errors import add_shard_note
from sharded_orm.exceptions import ShardedOrmError
from sharded_orm.management.actions import Action, CommandOfActions


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
def test_an_error_of_a_node_that_does_not_answer_has_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = runtime.shard("photos", 1)
    missing = {**connections.settings[shard.alias], "NAME": str(tmp_path / "missing" / "file")}
    error = OperationalError("unable to open database file")
    add_shard_note(error, shard)
    monkeypatch.setitem(connections.settings, shard.alias, missing)
    assert "See that its server runs" in message_of(error)


def test_an_error_without_notes_is_as_it_is() -> None:
    assert message_of(ShardedOrmError("Name a shard.")) == "Name a shard."
    assert message_of(DatabaseError("no such table: x")) == "no such table: x"


def test_an_interrupt_ends_the_command_line_without_a_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        _Command().run_from_argv(["manage.py", "example", "interrupt"])
    assert caught.value.code == 130
    assert capsys.readouterr().err == (
        "Interrupted. The same command may be run again; 'manage.py shards status' names an"
        " operation that was broken off.\n"
    )


def test_an_interrupt_reaches_those_who_ask_for_it() -> None:
    with pytest.raises(KeyboardInterrupt):
        _Command().run_from_argv(["manage.py", "example", "interrupt", "--traceback"])
    with pytest.raises(KeyboardInterrupt):
        call_command(_Command(), "interrupt")
