"""The pages of the photo site, on test databases of both backends; see ``inside/test_pages.py``."""

from __future__ import annotations

from pathlib import Path

from tests.acceptance.project import Project


def test_project_is_sound(tmp_path: Path) -> None:
    project = Project("sqlite", tmp_path)
    assert "no issues" in project.manage("check")
    assert "No changes detected" in project.manage("makemigrations", "--check", "--dry-run")


def test_pages(project: Project) -> None:
    assert "failed" not in project.pytest("test_pages.py")
