"""Types of arguments that several commands have, for argparse."""

from __future__ import annotations

from argparse import ArgumentTypeError
from datetime import timedelta


def positive(text: str) -> int:
    """Return the positive whole number that ``text`` gives."""
    if not text.isascii() or not text.isdigit() or not int(text):
        raise ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


def days(text: str) -> timedelta:
    """Return the duration that ``text`` gives as a number of days, which may have a fraction."""
    try:
        duration = timedelta(days=float(text))
    except (ValueError, OverflowError):
        duration = timedelta(days=-1)
    if duration < timedelta(0):
        raise ArgumentTypeError(f"{text!r} is no number of days")
    return duration
