"""The mover follows the changes of a key as long as there is hope."""

from __future__ import annotations

import json

from tests.integration.moves.site import MOVER, Site

_WRITER = (
    MOVER
    + """
changes = ChangeCapture.changes
ChangeCapture.changes = lambda self, number, limit=1000: changes(self, number, min(limit, 60))
with ShardSessions("books") as writers:
    writer = writers.capture(3)
    writer._connection.inc_thread_sharing()
    written = 0
    def write(times):
        global written
        for _ in range(times):
            written += 1
            writer._rows("UPDATE library_topic SET name = %s WHERE writer_id = 3", f"name {{written}}")
    {when}
    print(json.dumps(moves.move_keys("books", [3], 1).to_json()))
"""
)


def test_a_backlog_that_shrinks_is_followed_to_its_end(site: Site) -> None:
    """Each of the three topics is in the journal twice per update, so there are more than 100 rounds."""
    report = json.loads(
        site.run(_WRITER.format(when="after(RowCopy, 'put', lambda *args: write(1100))"))
    )
    assert report["moved"] == {"3": 1}, report
    names = "Topic.objects.filter(writer_id=3).values_list('name', flat=True)"
    assert site.run(f"print(*{names}, sep=', ')") == "name 1100, name 1100, name 1100"


def test_a_key_that_changes_faster_than_it_is_copied_stays(site: Site) -> None:
    report = json.loads(
        site.run(
            _WRITER.format(
                when="write(1); after(ChangeCapture, 'forget', lambda *args: write(11), 10**9);"
                "after(RowCopy, 'put', lambda *args: write(10))"
            )
        )
    )
    assert "changes came as fast as they were copied" in report["failures"]["3"]
    assert site.left() == ""
    assert site.place() == 3


def test_changes_are_followed_while_the_mover_waits_for_placements_to_expire(site: Site) -> None:
    report = json.loads(
        site.run(
            _WRITER.format(
                when="""
    clock, backlogs = [0.0], []
    runner.now = lambda: clock[0]
    def wait(self, seconds):
        if clock[0] == 0.0:
            write(50)
        clock[0] += min(max(seconds, 0.1), 0.5)
    Stopping.wait = wait
    def count(self, phase, **changes):
        if phase == "switching":
            backlogs.append(writer._rows("SELECT COUNT(*) FROM sharded_orm_capture_journal")[0][0])
    before(MoveRecord, "enter", count, 9)
    to_json = moves.MoveReport.to_json
    moves.MoveReport.to_json = lambda report: to_json(report) | dict(backlogs=backlogs)
"""
            )
        )
    )
    assert report["moved"] == {"3": 1}, report
    (backlog,) = report["backlogs"]
    assert backlog <= 50
