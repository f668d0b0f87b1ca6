"""How a tag is written: in one way, whatever way it is entered in."""

from __future__ import annotations

import re
from unicodedata import normalize

LONGEST = 40  # letters
_TAG = re.compile(r"\w[\w -]*")


class InvalidTags(ValueError):
    """What somebody entered is no tag, or no list of tags; the text tells why."""


def normal(tag: str) -> str:
    """One way of writing what people take for the same tag."""
    return " ".join(normalize("NFC", tag).lower().strip().removeprefix("#").split())


def check(tag: str) -> None:
    """A tag is part of addresses, so not every sign may be in it.

    :param tag: as :func:`normal` gives it.
    :raises InvalidTags: too long, or other signs than letters, digits, ``-`` and blanks.
    """
    if len(tag) > LONGEST:
        raise InvalidTags(f"“{tag[:LONGEST]}…” is longer than {LONGEST} letters.")
    if not _TAG.fullmatch(tag):
        raise InvalidTags(f"“{tag}”: a tag has letters, digits, hyphens and blanks only.")
