"""Random reads by plans: the statements, results and errors of Django's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis.strategies import SearchStrategy

from tests.queries.chains import Chain, Comparison, as_many, count_of_uses
from tests.queries.chains_of_items import (
    alike_chains_of_items,
    chains_of_items,
    small_chains_of_items,
)
from tests.queries.conftest import DATABASES
from tests.queries.twins import World

pytestmark = [pytest.mark.django_db(databases=DATABASES), pytest.mark.every_backend]


@pytest.mark.parametrize("chains", alike_chains_of_items(), ids=lambda chains: repr(chains[0]))
def test_chains_that_might_get_the_plan_of_another(chains: list[Chain], items: World) -> None:
    Comparison()(chains)


@pytest.mark.parametrize(
    ("chains", "examples"), [(small_chains_of_items, 45), (chains_of_items, 20)]
)
def test_random_chains(
    chains: Callable[[], SearchStrategy[list[Chain]]],
    examples: int,
    items: World,
    pytestconfig: pytest.Config,
) -> None:
    compare = Comparison()

    @as_many(examples, pytestconfig)
    @given(chains())
    def same(chains: list[Chain]) -> None:
        compare(chains, count_of_uses)

    same()
    assert compare.share("used") > 0.1
    assert compare.share("results") > 0.2
