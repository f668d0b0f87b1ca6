"""A topology in a file: read at the start, followed while it changes."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from sharded_orm.topology.document import Document
from sharded_orm.topology.last_good import LastGoodCopy
from tests.integration.topology.site import BREAK, MEND, Site, document, unusable_documents

BROKEN = {
    "STRATEGY": "tests.integration.topology.strategies.Broken",
    "RANGES": [{"range": [0, 0], "primary": "one"}],
}

# The account without rights that every Unix has.
NOBODY = 65534


def replace(site: Site, content: dict[str, Any] | str) -> None:
    """Replace the file as configuration management does: as a whole, by rename."""
    path = Path(site.source["OPTIONS"]["PATH"])
    made = path.with_suffix(".new")
    made.write_text(content if isinstance(content, str) else json.dumps(content))
    os.replace(made, path)


def test_a_change_is_used_by_the_next_statement(file_site: Site) -> None:
    with file_site.process() as process:
        assert process.ask("place()") == "one"
        replace(file_site, document(2, "two"))
        process.wait_version(2)
        assert process.ask("place()") == "two"


def test_a_bad_change_is_refused_and_named(file_site: Site) -> None:
    with file_site.process() as process:
        for bad, problem in (
            ("{", "it is not JSON"),
            (document(2, "three"), "unknown primary 'three'"),
            (document(2, shards=8), "the number of shards cannot change from 4 to 8"),
            (document(1, "two"), "version 1 does not come after 1"),
            (document(2, others=BROKEN), "it cannot be used: RuntimeError: a mistake"),
        ):
            replace(file_site, bad)
            process.wait_log(problem)
            assert process.ask("version()") == 1
            assert process.ask("place()") == "one"
        replace(file_site, document(2, "two"))
        process.wait_version(2)


def test_whatever_it_holds_the_next_one_is_followed(file_site: Site) -> None:
    with file_site.process() as process:
        version = 1
        for problem, text in unusable_documents(50).items():
            replace(file_site, text)
            process.wait_log(problem)
            assert process.ask("version()") == version
            assert problem in process.ask("refused()")
            version += 1
            replace(file_site, document(version, ("one", "two")[version % 2]))
            process.wait_version(version)
            assert process.ask("place()") == ("one", "two")[version % 2]
        assert "Exception in thread" not in process.log
        assert version == 1 + len(unusable_documents(50))


def test_a_document_that_cannot_be_begun_with_changes_nothing(file_site: Site) -> None:
    with file_site.process() as process:
        process.run(BREAK)
        replace(file_site, document(2, "two"))
        process.wait_log("version 2 is refused, version 1 stays in use")
        assert "it cannot be used: ZeroDivisionError: a mistake of ours" in process.ask("refused()")
        assert (process.ask("version()"), process.ask("place()")) == (1, "one")
        process.run(MEND)
        replace(file_site, document(3, "two"))
        process.wait_version(3)
        assert (process.ask("refused()"), process.ask("place()")) == ("", "two")


def test_who_looks_where_a_shard_is_while_a_change_fails_looks_again(file_site: Site) -> None:
    with file_site.process() as process:
        process.run(
            "from django.conf import settings\n"
            "from sharded_orm import database_settings\n"
            "from sharded_orm.backends.group import relocation\n"
            "seen = []\n"
            "def fail():\n"
            "    seen.append(database_settings.alias_settings('photos_00001'))\n"
            "    raise ZeroDivisionError('a mistake of ours')\n"
            "settings.DATABASES.renew_groups = fail\n"
        )
        replace(file_site, document(2, "two"))
        process.wait_log("version 2 is refused, version 1 stays in use")
        assert process.ask("seen[0]['SHARD'].node") == "two"
        assert process.ask("seen[0]['GENERATION'] != relocation.generation")


def test_toml_is_followed_whatever_it_holds(file_site: Site) -> None:
    path = Path(file_site.source["OPTIONS"]["PATH"]).with_suffix(".toml")
    file_site.source["OPTIONS"]["PATH"] = str(path)
    file_site.save()
    text = 'format = 1\nversion = {}\ngroups.photos.RANGES = [{{range = [0, 3], primary = "{}"}}]\n'
    path.write_text(text.format(1, "one"))
    with file_site.process() as process:
        replace(file_site, f"version = {'[' * 100_000}")
        process.wait_log("it is not TOML")
        replace(file_site, text.format(2, "two"))
        process.wait_version(2)


def test_a_last_good_copy_of_no_use_keeps_nothing_back(file_site: Site) -> None:
    file_site.last_good.parent.mkdir()
    for problem, text in unusable_documents(50).items():
        file_site.last_good.write_text(text)
        with file_site.process() as process:
            assert process.ask("version()") == 1
            assert "is of no use" in process.log
            assert problem in process.log
        assert LastGoodCopy(file_site.last_good).read() is not None


def test_wrong_settings_are_not_taken_for_a_missing_topology(file_site: Site) -> None:
    file_site.topology("show")
    file_site.sharded_orm["MOVE_WAIT"] = "two"
    file_site.save()
    err = file_site.topology("show", code=1).err
    assert "MOVE_WAIT must be a positive number of seconds, not 'two'" in err
    assert f"The last good copy in {str(file_site.last_good)!r} cannot be used either" in err
    assert "Correct SHARDED_ORM in the settings" in err
    assert "There is no last good copy" not in err
    assert "A first topology" not in err


def test_a_start_with_a_bad_file_uses_the_last_good_copy(file_site: Site) -> None:
    replace(file_site, document(5, "two"))
    file_site.topology("show")
    assert file_site.last_good.stat().st_mode & 0o777 == 0o600
    replace(file_site, "{")
    with file_site.process() as process:
        assert process.ask("version()") == 5
        assert process.ask("place()") == "two"
        assert "Going on with the last good copy" in process.log
        replace(file_site, document(6))
        process.wait_version(6)
    shown = file_site.topology("show", "--json").json
    assert (shown["version"], shown["origin"], shown["problems"]) == (6, "source", [])


def test_a_group_that_comes_can_be_used(file_site: Site) -> None:
    with file_site.process() as process:
        assert process.ask("sorted(connections)") == ["default", "photos"]
        visits = {"STRATEGY": "modulo", "RANGES": [{"range": [0, 1], "primary": "two"}]}
        replace(file_site, document(2, visits=visits))
        process.wait_version(2)
        assert process.ask("sorted(connections)") == ["default", "photos", "visits"]
        assert process.ask("connections['visits_00001'].settings_dict['SHARD'].node") == "two"
        process.run("with transaction.atomic(using='visits'): pass")


def test_a_copy_that_cannot_be_written_keeps_nothing_back(file_site: Site) -> None:
    file_site.source["OPTIONS"]["LAST_GOOD"] = str(file_site.file / "below a file")
    file_site.save()
    with file_site.process() as process:
        assert "The last good copy of the topology cannot be written" in process.log
        replace(file_site, document(2, "two"))
        process.wait_version(2)


def test_a_process_that_lags_behind_does_not_replace_a_newer_copy(tmp_path: Path) -> None:
    copy = LastGoodCopy(tmp_path / "copies" / "topology.json")
    assert copy.read() is None
    for version, kept in ((3, 3), (2, 3), (4, 4)):
        copy.save(Document.from_content(document(version)))
        read = copy.read()
        assert read is not None and read.version == kept
        assert [path.name for path in copy.path.parent.iterdir()] == ["topology.json"]
    copy.path.write_text("{")
    copy.save(Document.from_content(document(1)))
    assert copy.read() == Document.from_content(document(1))


def test_a_copy_that_another_account_has_written_is_taken_over() -> None:
    with tempfile.TemporaryDirectory() as folder:
        copy = LastGoodCopy(Path(folder) / "topology.json")
        copy.path.touch()
        copy.path.chmod(0)
        account = os.geteuid()
        if account == 0:  # root may read everything
            os.chown(folder, NOBODY, NOBODY)
            os.seteuid(NOBODY)
        try:
            copy.save(Document.from_content(document(1)))
            assert copy.read() == Document.from_content(document(1))
        finally:
            os.seteuid(account)


def test_a_copy_that_has_no_form_in_json_keeps_nothing_back(file_site: Site) -> None:
    path = Path(file_site.source["OPTIONS"]["PATH"]).with_suffix(".toml")
    file_site.source["OPTIONS"]["PATH"] = str(path)
    file_site.save()
    with_date = """
format = 1
version = 1
nodes.one.OPTIONS.since = 2026-01-01
groups.photos.RANGES = [{range = [0, 3], primary = "one"}]
"""
    path.write_text(with_date)
    with file_site.process() as process:
        assert process.ask("version()") == 1
        assert "The last good copy of the topology cannot be written" in process.log


@pytest.mark.parametrize(
    ("engine", "database", "address"),
    [("mysql", "", "db1:7777"), ("postgresql", "shop", "db1:7777/shop")],
)
def test_show_names_the_server_of_each_node_and_no_account(
    file_site: Site, engine: str, database: str, address: str
) -> None:
    pytest.importorskip({"mysql": "MySQLdb", "postgresql": "psycopg"}[engine])
    for node in file_site.nodes.values():
        node.clear()
        node |= {"ENGINE": f"sharded_orm.backends.{engine}", "HOST": "db1", "PORT": 7777}
        node |= {"NAME": database, "USER": "me", "PASSWORD": "s3cret"}
    file_site.save()
    shown = file_site.topology("show").out
    assert ["one", engine, address] in [line.split() for line in shown.splitlines()]
    assert "s3cret" not in shown + file_site.topology("show", "--json").out
