"""Fixtures of the acceptance tests, and what they tell in the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from django.conf import settings

from tests.acceptance.project import BACKENDS, SITE_SETTINGS, Project, project_on

# What is under inside/ needs the settings of the site; Project.pytest() gives it those.
collect_ignore = [] if settings.SETTINGS_MODULE == SITE_SETTINGS else ["inside"]

said = pytest.StashKey[list[str]]()


@pytest.fixture(params=BACKENDS)
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Project]:
    with project_on(request.param, request, tmp_path / "site") as made:
        yield made


@pytest.fixture
def say(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Tell something that is worth reading in the end of the run, failed or not."""
    return request.config.stash.setdefault(said, []).append


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    lines = config.stash.get(said, [])
    if lines:
        terminalreporter.section("what the acceptance tests measured")
        for line in lines:
            terminalreporter.write_line(line)
