"""Rows with lookups are written in every way while their keys, their shards and the shards of the entries move.

A query by a lookup finds what was acknowledged before, each unique value has one owner, and in the
end entries and rows are equal.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.lookups.site import PREAMBLE, Site
from tests.patience import PATIENCE

_TELLER = """
me, stop = {me}, {stop!r}
chance, known, done, wrong = random.Random(me), {{}}, collections.Counter(), []
pks = [me * 1000 + n for n in range(8)]

def own(pk):
    return Guest.objects.filter(house_id=me, pk=pk)

def absent():
    return [pk for pk in pks if pk not in known]

def some(count=1):
    return chance.sample(sorted(known), min(count, len(known)))

# Each of these writes, and returns the rows that it has changed: None for one that is gone.
def create():
    return {{pk: Guest.objects.create(id=pk, house_id=me, **any_values(chance)) for pk in absent()[:1]}}

def bulk_create():
    guests = [Guest(id=pk, house_id=me, **any_values(chance)) for pk in absent()[:3]]
    return {{guest.pk: guest for guest in Guest.objects.bulk_create(guests)}}

def get_or_create():
    email = chance.choice(VALUES["email"])
    for pk in absent()[:1]:
        guest, created = Guest.objects.get_or_create(email=email, defaults={{"id": pk, "house_id": me}})
        assert guest.email == email
        return {{guest.pk: guest}} if created else {{}}
    return {{}}

def changed(pks):
    guests = [Guest.objects.get(house_id=me, pk=pk) for pk in pks]
    for guest in guests:
        for name, value in any_values(chance).items():
            setattr(guest, name, value)
    return guests

def save():
    guests = changed(some())
    for guest in guests:
        guest.save()
    return {{guest.pk: guest for guest in guests}}

def update():
    for pk in some():
        values = any_values(chance)
        assert own(pk).update(**values) == 1
        return {{pk: Guest(id=pk, house_id=me, **values)}}
    return {{}}

def update_by_lookup():
    for pk in some():
        former, room = known[pk], chance.choice(VALUES["room"])
        for name in UNIQUE:
            if former[name] is not None:
                assert Guest.objects.filter(**{{name: former[name]}}).update(room=room) == 1
                return {{pk: Guest(id=pk, house_id=me, **{{**former, "room": room}})}}
    return {{}}

def bulk_update():
    guests = changed(some(3))
    Guest.objects.bulk_update(guests, NAMES)
    return {{guest.pk: guest for guest in guests}}

def delete():
    for pk in some():
        own(pk).delete()
        return {{pk: None}}
    return {{}}

def transaction_with_savepoint():
    with transaction.atomic(using="books"):
        try:
            with transaction.atomic(using="books"):
                create()
                delete()
                raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        rows = update()
        return {{**rows, **create()}}

def give():
    # A unique value goes from one row of the key to another.
    if len(known) < 2:
        return {{}}
    giver, taker = some(2)
    values = {{pk: dict(known[pk]) for pk in (giver, taker)}}
    values[taker]["email"], values[giver]["email"] = values[giver]["email"], None
    with transaction.atomic(using="books"):
        for pk in (giver, taker):
            own(pk).update(**values[pk])
    return {{pk: Guest(id=pk, house_id=me, **of_row) for pk, of_row in values.items()}}

def roll_back():
    try:
        with transaction.atomic(using="books"):
            create()
            update()
            delete()
            raise ZeroDivisionError
    except ZeroDivisionError:
        return {{}}

WRITES = (
    create, create, bulk_create, get_or_create, save, update, update_by_lookup, bulk_update, delete,
    transaction_with_savepoint, give, roll_back,
)

def look():
    for pk in some(2):
        for name in UNIQUE:
            if (value := known[pk][name]) is not None:
                guests = [(row.pk, row.house_id, getattr(row, name)) for row in Guest.objects.filter(**{{name: value}})]
                if guests != [(pk, me, value)] or Guest.objects.get(**{{name: value}}).pk != pk:
                    wrong.append([name, value, pk, guests])
    for name in NAMES:
        value = chance.choice(VALUES[name])
        guests = list(Guest.objects.filter(**{{name: value}}))
        mine = sorted(guest.pk for guest in guests if guest.house_id == me)
        wanted = sorted(pk for pk, values in known.items() if values[name] == value)
        is_twice = len(guests) != len({{guest.pk for guest in guests}}) or (name in UNIQUE and len(guests) > 1)
        if mine != wanted or is_twice or any(getattr(guest, name) != value for guest in guests):
            wrong.append([name, value, wanted, [(guest.pk, getattr(guest, name)) for guest in guests]])
    done["look"] += 1

while not os.path.exists(stop):
    write = chance.choice(WRITES)
    try:
        for pk, guest in write().items():
            if guest is None:
                del known[pk]
            else:
                known[pk] = {{name: getattr(guest, name) for name in NAMES}}
        done["write"] += 1
    except LookupValueTaken:
        done["taken"] += 1
    except (KeyMoved, ShardMoved):
        done["moved"] += 1
    except OperationalError as error:
        if not is_deadlock(error):
            raise
    look()
print(json.dumps([[[pk, me, *values.values()] for pk, values in known.items()], done, wrong]))
"""
_STATE = """
for name in UNIQUE:
    used(name)
stored, expected = collections.Counter(entries()), collections.Counter(expected_entries())
print(json.dumps([rows(), list(stored - expected), list(expected - stored)]))
"""

#: Keys and shards that move, with their targets.
_FEW = (
    ("keys", "books", "1", "3"),
    ("shards", "accounts", "0", "db2"),
    ("keys", "books", "2", "0"),
    ("shards", "books", "3", "db1"),
)
_MANY = (
    *_FEW,
    ("keys", "books", "3", "0"),
    ("shards", "accounts", "2", "db1"),
    ("keys", "books", "1", "0"),
    # A shard does not move while the fences of keys that have left it may be needed.
    ("shards", "books", "0", "db2"),
    ("shards", "accounts", "0", "db1"),
    ("shards", "books", "0", "db1"),
    ("keys", "books", "4", "1"),
    ("keys", "books", "2", "2"),
    ("keys", "books", "1", "1"),
    ("shards", "accounts", "2", "db2"),
    ("keys", "books", "3", "3"),
    ("shards", "accounts", "3", "db1"),
)


def _move(site: Site, what: str, group: str, moved: str, target: str) -> None:
    keep = ("--keep", "0") if what == "keys" else ()
    site.manage(what, "move", group, moved, "--to", target, *keep)


@pytest.mark.parametrize(
    ("moves", "count"),
    [
        pytest.param(_FEW, 3, id="few"),
        pytest.param(_MANY, 4, id="many", marks=pytest.mark.long),
    ],
)
def test_a_bank_with_lookups(site: Site, tmp_path: Path, moves: Any, count: int) -> None:
    stop = tmp_path / "stop"
    tellers = [
        site.start("run", PREAMBLE + _TELLER.format(me=me, stop=str(stop)))
        for me in range(1, count + 1)
    ]
    try:
        for move in moves:
            _move(site, *move)
    finally:
        stop.touch()
        results = []
        for teller in tellers:
            out, err = teller.communicate(timeout=PATIENCE)
            assert teller.returncode == 0, err
            results.append(json.loads(out))
    assert [wrong for _, _, wrong in results] == [[]] * count
    assert all(done["write"] > 10 and done["look"] > 10 for _, done, _ in results), results
    assert sum(done.get("taken", 0) for _, done, _ in results) > 0
    written = sorted(row for known, _, _ in results for row in known)
    assert json.loads(site.run(_STATE)) == [written, [], []]
    checked = site.manage("lookups", "check").err.splitlines()
    assert len(checked) == 4
    assert all("0 missing, 0 superfluous, 0 duplicates" in line for line in checked)
