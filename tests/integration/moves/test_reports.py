"""What a command has done is reported, also if it could not do everything."""

from __future__ import annotations

import json

from tests.integration.moves.site import MOVER, Site
from tests.integration.moves.test_kills import AFTER_SWITCH, BEFORE_SWITCH, killed


def test_a_refusal_in_a_later_batch_keeps_the_report_of_the_earlier_ones(site: Site) -> None:
    report = json.loads(
        site.run(
            MOVER
            + """
runner.ANNOUNCED_AT_ONCE = 1
def announce_another(self, *args):
    KeyMove.objects.using("directory").create(
        group="books", key="7", value="7", source=3, target=0, phase="announced", in_flight=True
    )
after(MoveRecord, "settle", announce_another)
print(json.dumps(moves.move_keys("books", [3, 7], 1).to_json()))
"""
        )
    )
    assert report["moved"] == {"3": 1}
    assert "another process moves '7'" in report["failures"]["7"]


def test_moves_that_were_ended_first_are_named(site: Site) -> None:
    killed(site, BEFORE_SWITCH[5], "3", "--to", "1")
    report = site.move("2", "--to", "1", "--json").json
    assert report["recovered"] == {"3": 3}
    killed(site, AFTER_SWITCH[0], "3", "--to", "1")
    done = site.move("2", "--to", "1")
    assert "moves that were broken off were ended first: '3' is on shard 1" in done.out


_AWAY = (
    MOVER
    + """
from django.db import OperationalError
def fail(*args, **kwargs):
    raise OperationalError("The target is away.")
before(RowCopy, "withdraw", fail, 99)
"""
)


def test_a_refused_move_says_why_the_earlier_one_was_not_ended(site: Site) -> None:
    killed(site, BEFORE_SWITCH[5], "3", "--to", "1")
    said = site.run(
        _AWAY
        + """
from sharded_orm.exceptions import MoveRefused
try:
    moves.move_keys("books", [3], 1)
except MoveRefused as error:
    print(error)
"""
    )
    assert "'3' are being moved already" in said
    assert "The target is away" in said


def test_the_message_of_a_move_that_could_not_be_undone(site: Site) -> None:
    report = json.loads(
        site.run(
            _AWAY
            + """
before(RowCopy, "publish", fail)
print(json.dumps(moves.move_keys("books", [3], 1).to_json()))
"""
        )
    )
    why = report["failures"]["3"]
    assert (
        "The target is away. The move was not ended either (OperationalError: The target is away). Nothing"
        in why
    )


def test_a_move_that_fails_after_its_switch_is_reported_with_its_pause(site: Site) -> None:
    said = site.run(
        MOVER
        + """
from django.db import OperationalError
def fail(*args):
    raise OperationalError("The session is gone.")
after(MoveRecord, "switch", fail)
report = moves.move_keys("books", [3], 1)
print(report.moved, report.ok, report.rows > 0, [0 < pause < 30 for pause in report.pauses])
"""
    )
    assert said.strip() == "{'3': 1} True True [True]"


def test_verify_names_the_rows_that_are_elsewhere(site: Site) -> None:
    site.run(
        "execute('books_00001', \"INSERT INTO library_topic (id, writer_id, name) VALUES (77, 3, 'stray')\")"
    )
    done = site.manage("keys", "verify", "books", "3", code=1)
    assert "3 belongs to shard 3, but shard 1 has 1 rows of it: library_topic 77" in done.err
