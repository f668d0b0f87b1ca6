"""The package, built and installed once for all tests of this folder."""

from __future__ import annotations

import pytest

from tests.docs.distribution import Distributions, Installation, build


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """The source distribution and the wheel."""
    return build(tmp_path_factory.mktemp("build"))


@pytest.fixture(scope="session")
def installation(
    distributions: Distributions, tmp_path_factory: pytest.TempPathFactory
) -> Installation:
    """An environment with the wheel; mypy and the stubs of Django are there for their test."""
    folder = tmp_path_factory.mktemp("installation")
    return Installation(folder, distributions.wheel, ("django-stubs", "mypy"))
