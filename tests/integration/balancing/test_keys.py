"""``keys balance``: plans from the rows, the directory or a file, and moves that are made."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.integration.imports.site import WRITERS
from tests.integration.moves.site import Site

SHARDS = [f"books_{number:05d}" for number in range(4)]


def plan(site: Site, *options: str) -> Any:
    return site.manage("keys", "balance", "books", *options, "--json").json


def moves(content: Any) -> dict[str, str]:
    """The target of each key."""
    return {key: step["moves"][0]["target"] for step in content["steps"] for key in step["keys"]}


def load(site: Site, **loads: float) -> tuple[str, ...]:
    file = site.folder / "load.json"
    file.write_text(json.dumps({key.removeprefix("k"): value for key, value in loads.items()}))
    return ("--by", "load", "--load", str(file))


def test_keys_move_by_their_rows(site: Site) -> None:
    """Two of the four keys with rows are on the last shard, none is on the first."""
    before = [site.rows(writer) for writer in (1, 2, 3, 7)]
    planned = plan(site, "--by", "rows")
    ((key, target),) = moves(planned).items()
    assert key in ("3", "7")
    assert target == SHARDS[0]
    assert planned["before"][SHARDS[3]] == sum(site.counts(writer)[3] for writer in (3, 7)), (
        "rows of tables with the key"
    )
    assert site.place(int(key)) == 3
    shown = site.manage("keys", "balance", "books", "--by", "rows").out
    assert "1 keys from books_00003 to books_00000" in shown
    assert "Nothing was changed." in shown

    done = site.manage("keys", "balance", "books", "--by", "rows", "--apply")
    assert "1 keys moved, 1 of 1 steps made." in done.out
    assert site.place(int(key)) == 0
    assert [site.rows(writer) for writer in (1, 2, 3, 7)] == before
    again = site.manage("keys", "balance", "books", "--by", "rows", "--cool-down", "0")
    assert "There is nothing to move." in again.out


def test_a_key_that_has_just_moved_stays(site: Site) -> None:
    keys = {f"k{number}": 1.0 for number in range(100, 120)}
    site.run(
        "from sharded_orm import runtime\n"
        f"runtime.strategy('books').store.place('books', {{key[1:]: 0 for key in {list(keys)!r}}})"
    )
    site.move("3", "--to", "0")
    options = load(site, k3=5.5, **keys)
    assert "3" in moves(plan(site, *options, "--cool-down", "0"))
    later = plan(site, *options)
    assert len(moves(later)) == 19
    assert "3" not in moves(later)
    assert later["after"][SHARDS[0]] == 6.5


def test_by_the_number_of_keys(site: Site) -> None:
    """Keys with rows move; keys of the directory without rows count."""
    site.run(
        "from sharded_orm import runtime\n"
        f"numbers = range({WRITERS + 1}, {WRITERS + 13})\n"
        "Writer.objects.bulk_create(Writer(id=n, name=f'w{n}') for n in numbers)\n"
        "runtime.strategy('books').store.place('books', {str(n): 1 for n in numbers})\n"
        "for n in numbers: Topic.objects.create(id=n, writer_id=n, name='one')"
    )
    planned = plan(site)
    assert planned["before"] == dict(zip(SHARDS, (2, 14, 2, 2), strict=True))
    assert max(planned["after"].values()) <= 1.1 * 5
    assert set(moves(planned)) <= {"1", *(str(n) for n in range(WRITERS + 1, WRITERS + 13))}
    report = plan(site, "--apply")
    assert sum(len(one["moved"]) for one in report["reports"]) == len(moves(planned))
    placed = json.loads(
        site.run(
            "from collections import Counter\n"
            "from sharded_orm.models import Placement\n"
            "rows = Placement.objects.using('directory').filter(group='books')\n"
            "print(json.dumps(Counter(rows.values_list('shard', flat=True))))"
        )
    )
    assert max(placed.values()) <= 5.5


def test_closed_shards_get_no_keys_and_weights_are_shares(site: Site) -> None:
    ranges = site.content["sharded_orm"]["GROUPS"]["books"]["RANGES"]
    ranges[:1] = [
        {"range": [0, 0], "primary": "db1", "open": False},
        {"range": [1, 1], "primary": "db1", "weight": 3},
    ]
    site.save()
    keys = {f"k{number}": 1.0 for number in range(100, 160)}
    site.run(
        "from sharded_orm import runtime\n"
        f"runtime.strategy('books').store.place('books', {{key[1:]: 3 for key in {list(keys)!r}}})"
    )
    planned = plan(site, *load(site, **keys))
    assert planned["shares"] == dict(zip(SHARDS, (0, 36, 12, 12), strict=True))
    assert set(moves(planned).values()) == {SHARDS[1], SHARDS[2]}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("accounts",), "the strategy 'modulo' of group 'accounts'"),
        (("books", "--by", "load"), "name a JSON file by --load"),
    ],
)
def test_what_cannot_be_planned(site: Site, arguments: tuple[str, ...], why: str) -> None:
    assert why in site.manage("keys", "balance", *arguments, code=1).err


def test_loads_of_keys_that_do_not_exist(site: Site) -> None:
    options = ("keys", "balance", "books")
    assert (
        "'nobody' cannot be a shard key" in site.manage(*options, *load(site, nobody=1), code=1).err
    )
    assert "keys without a shard: '999'" in site.manage(*options, *load(site, k999=1), code=1).err


def test_a_step_that_fails_ends_the_work(site: Site) -> None:
    """A unique value of the key's rows is taken on the target."""
    target = moves(plan(site, "--by", "rows"))
    ((key, _),) = target.items()
    site.run(
        "execute('books_00000', f'INSERT INTO {Topic._meta.db_table} (id, name, writer_id)'"
        f" ' VALUES ({key}00, %s, 1)', 'taken')"
    )
    failed = site.manage("keys", "balance", "books", "--by", "rows", "--apply", code=1)
    assert "has ids or unique values of the rows" in failed.err
    assert site.place(int(key)) == 3
