"""An operator aborts moves: those of a living process, and those that a dead one has left."""

from __future__ import annotations

import json

from tests.integration.moves.site import MOVER, Site
from tests.integration.moves.test_kills import BEFORE_SWITCH, killed

_ANNOUNCED = BEFORE_SWITCH[0]


def test_a_living_mover_notices_within_a_batch_that_its_move_was_aborted(site: Site) -> None:
    before = site.rows()
    said = json.loads(
        site.run(
            MOVER
            + """
key_mover.BATCH = 1
put, reports, late = RowCopy.put, [], 0
def put_and_abort(*args):
    global late
    put(*args)
    if reports:
        late += 1
    else:
        reports.append(moves.abort("books", [3]))
RowCopy.put = put_and_abort
moved = moves.move_keys("books", [3], 1)
print(json.dumps([moved.to_json(), reports[0].to_json(), late]))
"""
        )
    )
    moved, aborted, late = said
    assert "aborted by an operator" in moved["failures"]["3"]
    assert aborted["aborted"] == ["3"]
    assert "the process that moves it" in " ".join(aborted["notes"])
    assert late == 0, "rows were copied after the next batch"
    assert site.left() == ""
    assert site.rows() == before


def test_the_abort_of_one_key_leaves_the_others(site: Site) -> None:
    killed(site, _ANNOUNCED, "3", "7", "--to", "1")
    assert "3: aborted" in site.manage("keys", "abort", "books", "3").out
    moves = site.manage("keys", "status", "books", "--json").json["moves"]
    assert {move["key"]: (move["phase"], move["in_flight"]) for move in moves} == {
        "3": ("aborted", False),
        "7": ("announced", True),
    }
    assert "7: aborted" in site.manage("keys", "abort", "books").out
    assert site.left() == ""


def test_no_move_is_aborted_beside_a_migration(site: Site) -> None:
    """The rows that were copied cannot be removed meanwhile, so nothing is changed."""
    killed(site, BEFORE_SWITCH[5], "3", "--to", "1")
    said = site.run(
        MOVER
        + """
with journal.hold_run("migrate", "books", {}):
    try:
        moves.abort("books")
    except OperationHeld as error:
        print("migrate" in str(error), KeyMove.objects.using("directory").get(group="books").phase)
"""
    )
    assert said == "True copying"


def test_an_abort_says_what_it_could_not_remove(site: Site) -> None:
    killed(site, BEFORE_SWITCH[5], "3", "--to", "1")
    said = json.loads(
        site.run(
            MOVER
            + """
from django.db import OperationalError
def fail(*args):
    raise OperationalError("the target is away")
before(RowCopy, "discard_everywhere", fail, 99)
print(json.dumps(moves.abort("books").to_json()))
"""
        )
    )
    assert said["aborted"] == ["3"]
    assert not said["ok"]
    assert "the target is away" in said["failures"]["3"]
    assert site.manage("keys", "repair", "books", "--json").json["ok"]
    assert site.left() == ""
