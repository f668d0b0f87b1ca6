"""Random reads by plans: the statements, results and errors of Django's."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.queries.chains import Chain, Comparison, as_many, count_of_uses
from tests.queries.chains_of_items import chains_of_items
from tests.queries.conftest import DATABASES
from tests.queries.twins import World

pytestmark = [pytest.mark.django_db(databases=DATABASES), pytest.mark.every_backend]


def test_random_chains(items: World, pytestconfig: pytest.Config) -> None:
    compare = Comparison()

    @as_many(75, pytestconfig)
    @given(chains_of_items())
    def same(chains: list[Chain]) -> None:
        compare(chains, count_of_uses)

    same()
    assert compare.share("planned") > 0.1
    assert compare.share("results") > 0.2
