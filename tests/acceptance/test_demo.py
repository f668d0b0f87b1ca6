"""``manage.py demo --check`` from nothing, and again."""

from __future__ import annotations

import re

from tests.acceptance.project import Project


def test_the_demo_works_and_keeps_what_is_there(project: Project) -> None:
    first = project.manage("demo", "--check")
    assert "The demo works." in first
    assert re.search(r"sample content: 12 users, 150 photos and \d+ comments made", first)
    assert re.search(r"admin login admin / \S{8,}", first)

    second = project.manage("demo", "--check")
    assert "sample content: there already" in second
    # The pages that were looked at are those of the same photo.
    assert _pages(second) == _pages(first)


def _pages(output: str) -> list[str]:
    return re.findall(r"(?:GET|POST) .*", output)
