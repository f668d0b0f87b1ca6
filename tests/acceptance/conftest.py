"""Fixtures of the acceptance tests, and the summary that they print at the end of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from django.conf import settings

from tests.acceptance.movielens_data import Data, excerpt, find_or_make
from tests.acceptance.project import BACKENDS, SITE_SETTINGS, Project, project_on

# The tests below inside/ need the settings of the site; Project.pytest() runs them with those.
collect_ignore = [] if settings.SETTINGS_MODULE == SITE_SETTINGS else ["inside"]

#: One user in so many of the real MovieLens data; all of them with the long tests. With an odd number the
#: users are on all sixteen shards.
PART = 9

said = pytest.StashKey[list[str]]()


@pytest.fixture(params=BACKENDS)
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Project]:
    with project_on(request.param, request, tmp_path / "site") as project:
        yield project


@pytest.fixture(scope="session")
def data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Data:
    """A folder of MovieLens."""
    made = tmp_path_factory.mktemp("movielens")
    data = find_or_make(made)
    # Generated data are small already.
    if request.config.getoption("--long") or data.folder == made:
        return data
    return excerpt(data, tmp_path_factory.mktemp("excerpt"), PART)


@pytest.fixture
def say(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Print a line at the end of the run, whether the test fails or not."""
    return request.config.stash.setdefault(said, []).append


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    lines = config.stash.get(said, [])
    if lines:
        terminalreporter.section("what the acceptance tests measured")
        for line in lines:
            terminalreporter.write_line(line)
