"""The commands that ``--check`` suggests after an interrupted promotion: the tests run them."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.integration.promotion.site import Site
from tests.patience import PATIENCE

FINISH, UNDO = "shards promote db1", "shards promote db1 --abort"
BOTH = [FINISH, UNDO]
#: Where the promotion is killed, and the possible commands then.
POSSIBLE = {
    "begin:fencing": BOTH,
    "begin:waiting": BOTH,
    "begin:stopping": BOTH,
    "begin:unfencing": BOTH,
    "begin:switching": BOTH,
    "end:switching": [FINISH],
    "begin:switched": [FINISH],
    "begin:undoing": BOTH,
}


def suggested(site: Site, code: int = 1) -> list[str]:
    """Return the commands that a check names."""
    error = site.promote("--check", code=code).err
    assert "was broken off" in error
    return re.findall(r"'manage\.py (shards promote [^']+)'", error)


def follow(site: Site, suggestion: str) -> None:
    done = site.manage(*shlex.split(suggestion))
    assert done.code == 0, f"{suggestion}: {done.err}"


def break_off(site: Site, place: str) -> None:
    if place == "begin:undoing":
        site.promote_and_die("begin:unfencing")
        site.promote_and_die(place, "--abort")
    else:
        site.promote_and_die(place)


# The tests of kills run both commands from each phase, except from "undoing".
FOLLOWED = [
    *((place, possible[-1]) for place, possible in POSSIBLE.items()),
    ("begin:undoing", FINISH),
]


@pytest.mark.parametrize(("place", "suggestion"), FOLLOWED)
def test_a_suggestion_works(site: Site, place: str, suggestion: str) -> None:
    site.write_a_row(1)
    break_off(site, place)
    assert suggested(site) == POSSIBLE[place]
    follow(site, suggestion)
    assert site.is_promoted() if suggestion == FINISH else site.is_as_before()
    assert site.rows("second") == {1}


@pytest.mark.parametrize("suggestion", [f"{FINISH} --force", UNDO])
def test_without_the_old_primary(site: Site, suggestion: str) -> None:
    site.pair.first.kill()
    site.promote_and_die("begin:stopping", "--force", "--no-input")
    assert suggested(site) == [f"{FINISH} --force", UNDO]
    follow(site, suggestion)
    assert site.primaries() == ({"db1"} if suggestion == UNDO else {"db2"})
    assert site.is_read_only("second") == (suggestion == UNDO)


def test_an_old_primary_that_has_died_since(site: Site) -> None:
    site.write_a_row(1)
    site.wait_until_equal()
    site.promote_and_die("begin:stopping")
    site.pair.first.kill()
    assert suggested(site) == [UNDO, f"{FINISH} --force"]
    follow(site, UNDO)
    follow(site, f"{FINISH} --force --no-input")
    assert site.primaries() == {"db2"}
    assert site.rows("second") == {1}


def test_a_given_up_primary_that_has_come_back(site: Site) -> None:
    site.pair.first.kill()
    site.promote_and_die("begin:stopping", "--force", "--no-input")
    site.pair.first.start()
    assert suggested(site) == [UNDO, FINISH]
    follow(site, UNDO)
    site.wait_until_replicating()
    follow(site, FINISH)
    assert site.is_promoted()


def test_a_replica_that_has_died_since(site: Site) -> None:
    site.promote_and_die("begin:stopping")
    site.pair.second.kill()
    try:
        assert suggested(site) == [UNDO]
        follow(site, UNDO)
    finally:
        site.pair.second.start()
    assert not site.is_read_only("first")


@pytest.mark.parametrize("place", ["begin:unfencing", "begin:switching"])
def test_a_source_that_does_not_answer(site: Site, place: str) -> None:
    site.promote_and_die(place)
    site.trouble("down")
    error = site.promote("--check", code=1).err
    assert "are refused until" in error
    if place == "begin:unfencing":
        # The map was not published, whatever the source would say.
        assert suggested(site) == [UNDO]
        follow(site, UNDO)
        assert site.are_as_before()
        site.trouble("")
    else:
        assert "when it answers" in error
        assert suggested(site) == BOTH
        site.trouble("")
        follow(site, FINISH)
        assert site.is_promoted()


def test_another_command_is_told_the_same(site: Site) -> None:
    site.promote_and_die("begin:switched")
    done = site.manage("shards", "promote", "db2")
    assert done.code == 1
    assert "'manage.py shards promote db1'" in done.err
    assert "--abort" not in done.err


def test_one_that_is_under_way_is_not_begun_again(site: Site) -> None:
    with site.locked("second"):
        site.write_a_row(1)
        first = site.start("shards", "promote", "db1", "--timeout", "300")
        site.wait_for_run()
        assert "is under way" in site.promote("--check", code=1).err
    _out, err = first.communicate(timeout=PATIENCE)
    assert first.returncode == 0, err
