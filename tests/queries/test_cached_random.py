"""Random reads through the cache: the results and errors of the database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharded_orm.cache.request_cache import uncached
from sharded_orm.cache.statistics import Counts, counting
from sharded_orm.models.querysets.plans import without_plans
from tests.cached.models import CachedPhoto
from tests.queries.chains import Chain, Comparison, as_many
from tests.queries.chains_of_photos import (
    alike_chains_of_photos,
    chains_of_photos,
    fill,
    small_chains_of_photos,
)
from tests.queries.conftest import DATABASES, LATER, NEAR, ONE, TWO, Clock
from tests.queries.twins import comparable_value

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.long_on("mysql"),
    pytest.mark.django_db(transaction=True, databases=DATABASES),
]


@pytest.fixture
def filled(clock: Clock, placed: None) -> None:
    """Photos whose guards are older than their quarantine."""
    fill()
    for key in (ONE, NEAR, TWO):
        for album in (None, 1, 2, 7):
            list(CachedPhoto.objects.filter(user_id=key, album_id=album, stars=0))
    clock.ahead += LATER


@contextmanager
def plainly() -> Iterator[None]:
    with without_plans(), uncached():
        yield


def shown_result(read: Chain) -> tuple[Any]:
    """Return the result or the error of a read."""
    try:
        return (repr(comparable_value(read())),)
    except Exception as exc:  # any error of Django's: it must be the same
        return ((type(exc), str(exc)),)


class CachedComparison(Comparison):
    """Runs reads once without the cache and then again and again with it."""

    def __init__(self) -> None:
        super().__init__(shown_result, plainly)

    def __call__(
        self, chains: list[Chain], uses: Callable[[], int] = lambda: 0, *, by_plans: bool
    ) -> None:
        """Compare reads.

        :param by_plans: whether plans make the names of entries; otherwise all are made from queries.
        """
        # So that a failure does not depend on the entries of chains before.
        for key in (ONE, NEAR, TWO):
            CachedPhoto.cache.invalidate(user_id=key)
        with nullcontext() if by_plans else without_plans():
            super().__call__(chains, uses)


@pytest.mark.parametrize("by_plans", [False, True])
@pytest.mark.parametrize("chains", alike_chains_of_photos(), ids=lambda chains: repr(chains[1]))
def test_reads_that_might_get_the_entry_of_another(
    chains: list[Chain], by_plans: bool, filled: None
) -> None:
    CachedComparison()(chains, by_plans=by_plans)


@pytest.mark.parametrize(
    ("chains", "examples"), [(small_chains_of_photos, 60), (chains_of_photos, 20)]
)
def test_random_reads(
    chains: Callable[[], st.SearchStrategy[list[Chain]]],
    examples: int,
    filled: None,
    pytestconfig: pytest.Config,
) -> None:
    compare = CachedComparison()

    def hits() -> int:
        return sum(
            found.get(name, 0) for found in counts.values() for name in ("object_hits", "list_hits")
        )

    counts: Counts
    with counting() as counts:

        @as_many(examples, pytestconfig)
        @given(chains(), st.booleans())
        def same(chains: list[Chain], by_plans: bool) -> None:
            compare(chains, hits, by_plans=by_plans)

        same()
    assert compare.share("used") > 0.3
    assert compare.share("results") > 0.5
