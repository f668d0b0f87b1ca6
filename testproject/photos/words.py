"""Normal form and checks of a tag."""

from __future__ import annotations

import re
from unicodedata import normalize

LONGEST = 40  # letters
_TAG = re.compile(r"\w[\w -]*")


class InvalidTags(ValueError):
    """The text is no tag, or no list of tags; the message says why."""


def normal(tag: str) -> str:
    """Return the normal form that all spellings of a tag share."""
    return " ".join(normalize("NFC", tag).lower().strip().removeprefix("#").split())


def check(tag: str) -> None:
    """Check a tag. It is part of addresses, so not every character is allowed.

    :param tag: a tag as :func:`normal` returns it.
    :raises InvalidTags: too long, or other characters than letters, digits, ``-`` and blanks.
    """
    if len(tag) > LONGEST:
        raise InvalidTags(f"“{tag[:LONGEST]}…” is longer than {LONGEST} letters.")
    if not _TAG.fullmatch(tag):
        raise InvalidTags(f"“{tag}”: a tag has letters, digits, hyphens and blanks only.")
