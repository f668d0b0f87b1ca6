"""Asks the operator before a command does something that cannot be undone."""

from __future__ import annotations

from django.core.management import CommandError


def confirms(question: str, word: str) -> bool:
    """Ask the operator to type ``word`` to go on. Return whether it was typed.

    :raises CommandError: standard input has ended, as in a cron job, so nobody can be asked.
    """
    try:
        return input(f"{question} ({word}) to go on: ") == word
    except EOFError as exc:
        raise CommandError("Nobody can be asked here: use --no-input.") from exc
