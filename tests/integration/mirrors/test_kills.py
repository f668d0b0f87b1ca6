"""Writers and relays die at each of their statements, and at any time. Then a relay makes both sides equal."""

from __future__ import annotations

import random
from functools import partial

import pytest

from tests.integration.imports.kill_points import die_at_each_point
from tests.integration.imports.random_kills import die_at_any_time
from tests.integration.mirrors.site import PREAMBLE, Site

_PREPARE = """
from sharded_orm.contrib.mirrors import relay, removal
removal.REMOVED_AT_ONCE = 1  # Each delivery also removes its row from the outbox.
"""
_WRITER = """
n = note(1, 2, "first")
n.author_id, n.text = 3, "second"
n.save()
with sharded_orm.atomic(Note, owner_id=4):
    m = note(4, 5, "third")
    Note.objects.filter(owner_id=4).update(text="fourth")
n.delete()
"""
_LEFT_TO_RELAYS = (
    """
from sharded_orm.contrib.mirrors import capture
for alias in aliases("books"):
    QuerySet(Note, using=alias)._raw_delete(alias)
capture.TransactionChanges.deliver_after_commit = lambda *ignored: None
"""
    + _WRITER
)
_RELAY = """
point = 0
relay.relay(min_age=0)
"""
_STATE = """
from sharded_orm.contrib.mirrors import relay
while relay.relay(min_age=0).delivered:
    pass
print(differences(), outbox())
"""


def _both_sides_are_equal(site: Site, where: int) -> None:
    assert site.run(_STATE) == "[] 0", where


@pytest.mark.long
def test_a_writer_dies_around_each_statement_and_commit(site: Site) -> None:
    die_at_each_point(site, _PREPARE + _WRITER, partial(_both_sides_are_equal, site))


@pytest.mark.long
def test_a_relay_dies_around_each_statement_and_commit(site: Site) -> None:
    die_at_each_point(
        site,
        _PREPARE + _RELAY,
        partial(_both_sides_are_equal, site),
        before=lambda: site.run(_LEFT_TO_RELAYS),
    )


#: Works until the alarm ends the process, without a chance to clean up.
_IMPORTS = """
from django.db import OperationalError
from sharded_orm.contrib.mirrors import relay, removal
removal.REMOVED_AT_ONCE = 3
"""
_ANY_WRITES = """
owner = seed % 4 + 1
while True:
    try:
        notes = list(Note.objects.uncached().filter(owner_id=owner))
        what = chance.random()
        if len(notes) < 3 or what < 0.2:
            note(owner, chance.choice([None, *range(1, 9)]), str(chance.random()))
        elif what < 0.35:
            chance.choice(notes).delete()
        elif what < 0.5:
            Note.objects.filter(owner_id=owner).update(author_id=chance.randint(1, 8))
        elif what < 0.65:
            with sharded_orm.atomic(Note, owner_id=owner):
                note(owner, 1, str(chance.random()))
                Note.objects.filter(owner_id=owner, pk=notes[0].pk).update(is_public=chance.random() < 0.5)
        else:
            n = chance.choice(notes)
            n.author_id, n.text = chance.choice([None, *range(1, 9)]), str(chance.random())
            n.save()
    except OperationalError:
        pass  # Locks of others.
"""
_RELAYS = """
while True:
    relay.relay(min_age=0)
"""


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(10, id="some"),
        pytest.param(500, id="many", marks=pytest.mark.long),
    ],
)
def test_writers_and_relays_die_at_any_time(site: Site, kills: int) -> None:
    programs = [_ANY_WRITES, _ANY_WRITES, _RELAYS] * (2 if kills > 10 else 1)
    chance = random.Random(kills)
    for killed in die_at_any_time(site, PREAMBLE + _IMPORTS, programs, kills, chance):
        _both_sides_are_equal(site, killed)
