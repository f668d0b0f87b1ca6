from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import service_missing
from tests.services import ServiceMissing
from tests.services.replication import MasterPair, master_pair


@pytest.fixture(scope="session")
def pair() -> Iterator[MasterPair]:
    """Two servers that replicate from each other, for all tests of this folder."""
    try:
        with master_pair() as pair:
            yield pair
    except ServiceMissing as exc:
        service_missing(exc)
