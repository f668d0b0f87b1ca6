from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.entities.site import Site, site_on
from tests.integration.imports.site import BACKENDS

_IN_LONG_RUNS = [pytest.param(backend, marks=pytest.mark.long) for backend in BACKENDS[1:]]


@pytest.fixture(params=[BACKENDS[0], *_IN_LONG_RUNS])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    """A site on SQLite; in long runs, also on servers."""
    with site_on(request.param, request, tmp_path) as site:
        yield site


@pytest.fixture(params=BACKENDS)
def site_everywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    """A site on each kind of database, in each run."""
    with site_on(request.param, request, tmp_path) as site:
        yield site
