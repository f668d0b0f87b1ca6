from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.imports.site import BACKENDS
from tests.integration.mirrors.site import Site, site_on


@pytest.fixture(params=BACKENDS)
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    with site_on(request.param, request, tmp_path) as site:
        yield site
