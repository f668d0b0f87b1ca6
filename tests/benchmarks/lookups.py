"""Lookups: a row by its id alone, and an insert of a unique value."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from sharded_orm.contrib.lookups import entries, states
from sharded_orm.contrib.lookups.declaration import lookups_of
from tests.benchmarks.finders.models import Found, Known, Numbered
from tests.benchmarks.models import Photo
from tests.benchmarks.report import Line, at_most
from tests.benchmarks.site import START, Site
from tests.benchmarks.timing import Rounds, compare

CALLS = 40
#: Above the ids of all other rows.
FIRST = 10**9


def reads_and_inserts(site: Site, rounds: Rounds) -> Iterator[Line]:
    """Compare with the same queries by the key, and with inserts without lookups."""
    user, pk = site.photo(7)
    for model in (Found, Known):
        (lookup,) = lookups_of(model)
        key = lookup.key_text(user)
        place = entries.Place(lookup.name, lookup.text(pk), lookup.slot(pk, key))
        entries.add([place], [key], "benchmark", "")
        states.serve(lookup)
    states.serve(*lookups_of(Numbered))

    def with_key() -> Photo:
        return Photo.objects.get(user_id=user, photo_id=pk)

    measured = compare(lambda: Found.objects.get(photo_id=pk), with_key, rounds, number=CALLS)
    yield at_most(2.2, "get() by a lookup", "get() with the key", measured)
    measured = compare(lambda: Known.objects.get(photo_id=pk), with_key, rounds, number=CALLS)
    yield at_most(1.3, "get() by a unique lookup, remembered", "get() with the key", measured)
    ids = count(FIRST)

    def insert(model: type[Photo] | type[Numbered]) -> None:
        number = next(ids)
        model.objects.create(
            photo_id=number, user_id=user, title="new", posted_at=START, stars=number
        )

    measured = compare(lambda: insert(Numbered), lambda: insert(Photo), rounds, number=CALLS)
    yield at_most(2.5, "insert with a unique lookup", "insert without lookups", measured)
    Photo.objects.filter(user_id=user, photo_id__gte=FIRST).delete()
