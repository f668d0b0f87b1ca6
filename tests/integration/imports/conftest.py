from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.imports.site import BACKENDS, Site, site_on
from tests.integration.imports.stored_sites import set_up_once


@pytest.fixture(params=BACKENDS)
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    with site_on(request.param, request, tmp_path) as site:
        set_up_once(site, site.prepare)
        yield site
