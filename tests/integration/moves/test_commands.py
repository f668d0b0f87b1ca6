"""The commands of an operator: status, abort, repair, and moves of many keys."""

from __future__ import annotations

import json
from pathlib import Path

from tests.integration.moves.site import Site
from tests.integration.moves.test_kills import BEFORE_SWITCH, killed


def test_many_keys_from_a_file(site: Site, tmp_path: Path) -> None:
    before = [site.rows(writer) for writer in (1, 2, 3, 7)]
    file = tmp_path / "keys.txt"
    file.write_text("1\n2\n\n3\n")
    report = site.move(
        "7", "--from-file", str(file), "--to", "auto", "--workers", "2", "--json"
    ).json
    assert report["ok"], report
    assert sorted(report["moved"]) == ["1", "2", "3", "7"]
    assert [site.place(writer) for writer in (1, 2, 3, 7)] == [
        report["moved"][key] for key in ("1", "2", "3", "7")
    ]
    assert [site.rows(writer) for writer in (1, 2, 3, 7)] == before


def test_a_move_that_was_broken_off_is_shown_and_aborted(site: Site) -> None:
    before = site.rows()
    assert "was ever moved" in site.manage("keys", "status", "books").out
    killed(site, BEFORE_SWITCH[5], "3", "--to", "1")
    (move,) = site.manage("keys", "status", "books", "--json").json["moves"]
    assert (move["key"], move["phase"], move["in_flight"]) == ("3", "copying", True)
    assert "copying  under way" in site.manage("keys", "status", "books").out
    assert "3: aborted" in site.manage("keys", "abort", "books", "3").out
    assert site.left() == ""
    assert site.rows() == before
    (move,) = site.manage("keys", "status", "books", "--json").json["moves"]
    assert (move["phase"], move["in_flight"]) == ("aborted", False)
    assert move["error"] == "aborted by an operator"
    assert "No move could be aborted" in site.manage("keys", "abort", "books").out


def test_old_rows_are_kept_and_then_removed(site: Site) -> None:
    site.move("3", "--to", "1")
    assert "sharded_orm_capture_rows" in site.left()
    site.move("3", "--to", "2", "--keep", "0")
    site.manage("keys", "repair", "books")
    (last, first) = site.manage("keys", "status", "books", "--json").json["moves"]
    assert first["kept_until"] and not last["kept_until"]
    # SQLite does not tell which sessions have ended, so the fence stays a day. A server may have other
    # sessions that are idle since before the switch.
    assert last["fenced"] or site.backend != "sqlite3"


def test_from_python(site: Site) -> None:
    before = site.rows()
    assert site.run("import sharded_orm; print(sharded_orm.move_key('books', 3, to=1))") == "1"
    writer = "Writer.objects.get(pk=3)"
    assert (
        site.run(f"import sharded_orm; print(sharded_orm.move_key('books', {writer}, to=1))") == "1"
    )
    assert site.rows() == before
    refused = json.loads(
        site.run(
            "import sharded_orm\n"
            "from sharded_orm.operations.exceptions import JournalMissing\n"
            "try:\n"
            "    with transaction.atomic(): sharded_orm.move_key('books', 3, to=2)\n"
            "except JournalMissing as error: print(json.dumps(str(error)))"
        )
    )
    assert "inside a transaction" in refused


def test_a_number_of_moves_is_not_negative(site: Site) -> None:
    done = site.python("manage.py", "keys", "status", "books", "--last", "-1")
    assert done.code == 2
    assert "'-1' is no number of moves" in done.err
    assert "was ever moved" in site.manage("keys", "status", "books", "--last", "0").out
