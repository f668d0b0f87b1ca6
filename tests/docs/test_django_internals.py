"""The page about private parts of Django against the code, and their source against fingerprints."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs import django_parts
from tests.versions import DJANGO_RELEASE, DJANGO_VERSION

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "django-internals.md"


def _of_django() -> str:
    """The part of the page that is about Django; the rest is about drivers."""
    return PAGE.read_text().partition("## Private parts of psycopg")[0]


def test_the_page_lists_what_is_used() -> None:
    listed = set(re.findall(r"`(?:[\w.]+\.)?(_[a-zA-Z]\w*)`", _of_django()))
    listed -= django_parts.DOCUMENTED
    used = django_parts.used_private_parts()
    assert used <= listed
    # A part of a newer Django is missing in an older one.
    newest = max(django_parts.read(), key=_number)
    assert listed == used or _number(newest) > _number(DJANGO_VERSION)


def test_the_page_names_the_versions() -> None:
    names = ", ".join(sorted(django_parts.read(), key=_number))
    assert f"Checked against Django {names}." in PAGE.read_text()


def test_the_source_of_each_part_is_known() -> None:
    """A later Django with another source fails here: read what changed before you write it down."""
    known = django_parts.read().get(DJANGO_VERSION, {})
    changed = django_parts.changes(known, django_parts.fingerprints())
    assert not changed, (
        f"Django {DJANGO_RELEASE} differs from the version that was checked. Read these parts"
        " in its source, follow them, and then run"
        f" '{django_parts.COMMAND} --write':\n" + "\n".join(changed)
    )


def test_a_change_of_the_source_changes_the_fingerprint() -> None:
    known = django_parts.fingerprints()
    part = next(iter(known))
    assert django_parts.changes(known, {**known, part: ""}) == [f"changed: {part}"]
    assert django_parts.changes({}, {part: ""}) == [f"added: {part}"]
    assert django_parts.changes({part: ""}, {}) == [f"gone: {part}"]


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
