"""Asks the operator before a command does something that cannot be undone."""

from __future__ import annotations

from django.core.management import CommandError


def confirms_loss_of(node: str) -> bool:
    """Ask the operator to type ``node``, the name of the node that is given up. Return whether it
    was typed.

    :raises CommandError: standard input has ended, as in a cron job, so nobody can be asked.
    """
    try:
        return input(f"Type the name of the node that is given up ({node}) to go on: ") == node
    except EOFError as exc:
        raise CommandError("Nobody can be asked here: use --no-input.") from exc
