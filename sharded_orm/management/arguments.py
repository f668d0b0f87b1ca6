"""Command-line arguments that several commands have, and the types of such arguments."""

from __future__ import annotations

import threading
from argparse import ArgumentTypeError
from datetime import timedelta

from django.core.management.base import CommandParser


def positive(text: str) -> int:
    """Return ``text`` as an int. It must be a positive whole number.

    :raises ArgumentTypeError: ``text`` is anything else.
    """
    if not text.isascii() or not text.isdigit() or not int(text):
        raise ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


def not_negative(text: str) -> int:
    """Return ``text`` as an int. It must be a whole number, 0 or more.

    :raises ArgumentTypeError: ``text`` is anything else.
    """
    if not text.isascii() or not text.isdigit():
        raise ArgumentTypeError(f"{text!r} is neither 0 nor a positive number")
    return int(text)


def seconds(text: str) -> float:
    """Return ``text``, a number of seconds such as ``0.5``, as a float. It must be 0 or more.

    :raises ArgumentTypeError: ``text`` is anything else, or more than a wait can last.
    """
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= threading.TIMEOUT_MAX:
        raise ArgumentTypeError(f"{text!r} is no number of seconds")
    return number


def positive_seconds(text: str) -> float:
    """Return ``text``, a number of seconds such as ``0.5``, as a float. It must be more than 0.

    :raises ArgumentTypeError: ``text`` is anything else, or more than a wait can last.
    """
    number = seconds(text)
    if not number:
        raise ArgumentTypeError(f"{text!r} is no positive number of seconds")
    return number


def share(text: str) -> float:
    """Return ``text`` as a float. It must be more than 0, and 1 at most.

    :raises ArgumentTypeError: ``text`` is anything else.
    """
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1:
        raise ArgumentTypeError(f"{text!r} is no number from 0 to 1, without 0")
    return number


def days(text: str) -> timedelta:
    """Return ``text``, a number of days such as ``7`` or ``0.5``, as a duration.

    :raises ArgumentTypeError: ``text`` is no such number.
    """
    try:
        duration = timedelta(days=float(text))
    except (ValueError, OverflowError):
        duration = timedelta(days=-1)
    if duration < timedelta(0):
        raise ArgumentTypeError(f"{text!r} is no number of days")
    return duration


def add_kill(parser: CommandParser) -> None:
    """Add the option ``--kill``. It ends the database sessions of a process that hangs or is
    paused, because such sessions may hold locks.
    """
    parser.add_argument(
        "--kill",
        action="store_true",
        help="End the database sessions of a process that has begun a move and holds locks, because it"
        " was paused or hangs. Only while no process moves anything.",
    )
