"""Writers of rows with lookups, and repairs, die at any time.

Each row has its entries, no two rows have the same unique value, and a value that no row has is free.
"""

from __future__ import annotations

import random

import pytest

from tests.integration.imports.random_kills import die_at_any_time
from tests.integration.lookups.site import PREAMBLE, Site
from tests.patience import PATIENCE

_ANY_WRITES = """
house = chance.randint(1, 4)

def create():
    Guest.objects.create(id=chance.randint(1, 9) * 10 + house, house_id=house, **any_values(chance))

def create_many():
    pks = chance.sample(range(1, 10), 3)
    Guest.objects.bulk_create([Guest(id=pk * 10 + house, house_id=house, **any_values(chance)) for pk in pks])

def save(guest):
    for name, value in any_values(chance).items():
        setattr(guest, name, value)
    guest.save()

def update(guest):
    Guest.objects.filter(house_id=house, pk=guest.pk).update(**any_values(chance))

def bulk_update(guest):
    guest.email, guest.room = chance.choice(VALUES["email"]), chance.choice(VALUES["room"])
    Guest.objects.bulk_update([guest], ["email", "room"])

def delete(guest):
    guest.delete()

def in_transaction(guest):
    with transaction.atomic(using="books"):
        update(guest)
        create()
        if chance.random() < 0.3:
            transaction.set_rollback(True, using="books")

while True:
    try:
        guests = list(Guest.objects.filter(house_id=house))
        if len(guests) < 2 or chance.random() < 0.3:
            chance.choice([create, create, create_many])()
        else:
            chance.choice([save, update, bulk_update, delete, in_transaction])(chance.choice(guests))
    except (IntegrityError, OperationalError):
        pass  # The value or the id is taken, or others hold locks.
"""
_REPAIRS = """
while True:
    for lookup in maintenance.selected(()):
        maintenance.check(lookup, repair=True)
"""
#: What is left by those who died, before and after a repair.
_STATE = """
if connections["default"].vendor == "sqlite":
    reservation.QUARANTINE = 0.0  # As if they had died long ago.
deadline = time.monotonic() + {patience}

def until(is_done):
    # The server may not have noticed yet that a dead process is gone.
    while not is_done():
        assert time.monotonic() < deadline, (entries(), expected_entries())

def is_repaired():
    for lookup in maintenance.selected(()):
        maintenance.check(lookup, repair=True)
    return entries() == expected_entries()

def is_claimed(name, value):
    try:
        guest = Guest.objects.create(id=1000, house_id=8, **{{name: value}})
    except LookupValueTaken:
        return False
    guest.delete()
    return True

for name in UNIQUE:
    used(name)
for lookup in maintenance.selected(()):
    checked = maintenance.check(lookup)
    assert (checked.missing, checked.duplicates) == (0, 0), checked
if {is_claimed_first}:
    # A creator takes over what the dead have left, without a repair.
    for name in UNIQUE:
        for value in sorted(set(VALUES[name]) - used(name)):
            until(lambda: is_claimed(name, value))
until(is_repaired)
for name in UNIQUE:
    for value in sorted(set(VALUES[name]) - used(name)):
        assert is_claimed(name, value), (name, value)
    for value in sorted(used(name)):
        assert not is_claimed(name, value), (name, value)
assert entries() == expected_entries()
print("equal")
"""


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(6, id="some"),
        pytest.param(500, id="many", marks=pytest.mark.long),
    ],
)
def test_writers_die_at_any_time(site: Site, kills: int) -> None:
    chance = random.Random(kills)
    programs = [*[_ANY_WRITES] * 5, _REPAIRS]
    for killed in die_at_any_time(site, PREAMBLE, programs, kills, chance):
        state = _STATE.format(patience=PATIENCE, is_claimed_first=chance.random() < 0.5)
        assert site.run(state) == "equal", killed
