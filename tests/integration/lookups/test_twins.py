"""Random writes and reads of a model with lookups give what one database with a unique index gives."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from django.db import IntegrityError, transaction
from django.db.models import Q

from sharded_orm.contrib.lookups.exceptions import LookupValueTaken
from tests.finders.models import Account, Member, PlainAccount
from tests.integration.lookups.conftest import differences
from tests.queries.conftest import DATABASES, NEAR, ONE, TWO

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.django_db(databases=DATABASES, transaction=True),
]

KEYS, EMAILS = (ONE, NEAR, TWO), ["a@x", "b@x", "c@x", "d@x", None]
COLUMNS = ("id", "user_id", "email", "serial")


class Undo(Exception):
    """Rolls a block back on purpose."""


class Step:
    """One random write or read, the same for both models."""

    def __init__(self, rng: random.Random, ids: list[int]) -> None:
        self.kind = rng.choice(
            ["create", "create", "bulk_create", "save", "update", "update_by_lookup", "bulk_update",
             "delete", "delete_by_lookup", "get_or_create", "update_or_create", "change_key", "read",
             "read"]
        )  # fmt: skip
        self.key, self.email, self.other = rng.choice(KEYS), rng.choice(EMAILS), rng.choice(EMAILS)
        self.serial, self.new_serial = rng.randrange(4), rng.randrange(4)
        self.id = len(ids) + 1
        ids.append(self.id)
        self.old = rng.choice(ids)

    def run(self, model: Any) -> Any:
        rows = model.objects
        if self.kind == "create":
            return rows.create(
                id=self.id, user_id=self.key, email=self.email, serial=self.serial
            ).id
        if self.kind == "bulk_create":
            pair = [(self.id, self.email), (self.id + 10_000, self.other)]
            objs = [model(id=n, user_id=self.key, email=e, serial=self.serial) for n, e in pair]
            return len(rows.bulk_create(objs))
        if self.kind == "get_or_create":
            defaults = {"id": self.id, "user_id": self.key, "serial": self.serial}
            row, created = rows.get_or_create(email=self.email or "e@x", defaults=defaults)
            return row.id, created
        if self.kind == "update_or_create":
            row, created = rows.update_or_create(
                email=self.email or "e@x",
                defaults={"serial": self.new_serial},
                create_defaults={"id": self.id, "user_id": self.key, "serial": self.serial},
            )
            return row.id, created
        if self.kind == "save":
            for row in rows.filter(user_id=self.key, id__in=[self.old, self.old + 10_000]):
                row.email, row.serial = self.email, self.serial
                row.save()
            return None
        if self.kind == "update":
            return rows.filter(user_id=self.key, serial=self.serial).update(
                email=self.email, serial=self.new_serial
            )
        if self.kind == "update_by_lookup":
            return rows.filter(email=self.email or "e@x").update(email=self.other)
        if self.kind == "bulk_update":
            found = list(rows.filter(user_id=self.key).order_by("id")[:3])
            for number, row in enumerate(found):
                row.serial = self.serial + number
            return rows.bulk_update(found, ["serial"]) if found else 0
        if self.kind == "delete":
            return rows.filter(user_id=self.key, id=self.old).delete()[0]
        if self.kind == "delete_by_lookup":
            return rows.filter(serial=self.serial).delete()[0]
        email = self.email or "e@x"
        if self.kind == "change_key":
            return self._change_key(rows.filter(email=email))
        return [
            sorted(rows.filter(email=email).values_list(*COLUMNS)),
            sorted(rows.filter(serial__in=[self.serial, self.new_serial]).values_list(*COLUMNS)),
            rows.filter(Q(email=email) | Q(user_id=self.key)).count(),
            rows.filter(email=email, serial=self.serial).exists(),
        ]

    def _change_key(self, rows: Any) -> Any:
        """Delete the row of an address and create it again with another key, whose shard may be another.

        The row is read twice before, because the second read uses a remembered key if there are any.
        """
        found = [row for _ in range(2) for row in rows.all()]
        deleted = rows.delete()[0]
        if found:
            row = found[0]
            key = KEYS[KEYS.index(row.user_id) - 1]
            rows.create(id=self.id, user_id=key, email=row.email, serial=self.serial)
        return len(found), deleted, sorted(rows.values_list(*COLUMNS))


def result_of(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except IntegrityError as exc:
        return exc


def compare(plain: Any, sharded: Any, steps: Any) -> None:
    shown = [vars(step) for step in steps]
    if isinstance(plain, IntegrityError):
        assert isinstance(sharded, IntegrityError), (sharded, shown)
    else:
        assert sharded == plain, shown


def block(model: Any, steps: list[Step], ends: list[bool], alias: str) -> list[Any]:
    """Run steps in one transaction, each in a savepoint; roll some of them back."""
    results: list[Any] = []
    with transaction.atomic(using=alias):
        for step, keep in zip(steps, ends, strict=True):
            try:
                with transaction.atomic(using=alias):
                    results.append(step.run(model))
                    if not keep:
                        raise Undo
            except Undo:
                pass
    return results


def run_seed(seed: int, count: int, model: Any = Account) -> tuple[int, int]:
    """Return the numbers of blocks, and of those that only the shards have refused."""
    rng, ids = random.Random(seed), list[int]()
    blocks = refused = 0
    for _ in range(count):
        if rng.random() < 0.7:
            step = Step(rng, ids)
            plain = result_of(lambda: step.run(PlainAccount))  # noqa: B023
            compare(plain, result_of(lambda: step.run(model)), [step])  # noqa: B023
            continue
        steps = [Step(rng, ids) for _ in range(rng.randrange(1, 5))]
        ends = [rng.random() < 0.7 for _ in steps]
        is_undone = rng.random() < 0.2
        blocks += 1
        with suppress(Undo), transaction.atomic(using="photos"):
            sharded = result_of(lambda: block(model, steps, ends, "photos"))  # noqa: B023
            if is_undone or isinstance(sharded, IntegrityError):
                raise Undo
        with suppress(Undo), transaction.atomic():
            plain = result_of(lambda: block(PlainAccount, steps, ends, "default"))  # noqa: B023
            if is_undone or isinstance(sharded, IntegrityError):
                raise Undo
        if isinstance(sharded, LookupValueTaken) and not isinstance(plain, IntegrityError):
            # In one transaction a value may not go from key to key: refused, never wrong.
            refused += 1
        else:
            compare(plain, sharded, steps)
    rows = sorted(model.objects.scatter().values_list(*COLUMNS))
    assert rows == sorted(PlainAccount.objects.values_list(*COLUMNS))
    assert all(number == 0 for each in differences().values() for number in (each[0], each[2]))
    model.objects.scatter().delete()
    PlainAccount.objects.all().delete()
    return blocks, refused


@pytest.mark.parametrize(("seed", "model"), [(0, Account), (1, Account), (2, Member)])
def test_random_writes(accounts: Any, seed: int, model: Any) -> None:
    for account in accounts:
        account.delete()
    blocks, refused = run_seed(seed, 60, model)
    assert refused < blocks


@pytest.mark.long
def test_many_random_writes(accounts: Any) -> None:
    for account in accounts:
        account.delete()
    for seed in range(100, 160):
        run_seed(seed, 120, (Account, Member)[seed % 2])
