"""A change in running processes: transactions end where they began, the rest moves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.topology.conftest import site_with_file
from tests.integration.topology.site import Site, SiteProcess, document
from tests.integration.topology.test_file import replace


@pytest.fixture(params=["sqlite", "mysql", "postgres"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Site:
    nodes = request.getfixturevalue(f"{request.param}_nodes")
    names = {} if request.param == "sqlite" else {"DATABASE_NAME": "moved_{shard:05d}"}
    return site_with_file(tmp_path, nodes, group=names)


@pytest.fixture
def process(site: Site) -> Iterator[SiteProcess]:
    with site.process() as started:
        yield started


def move(site: Site, process: SiteProcess, version: int, primary: str) -> None:
    replace(site, document(version, primary))
    process.wait_version(version)


def test_autocommit_goes_to_the_new_place_and_back(site: Site, process: SiteProcess) -> None:
    process.run("held = connections['photos_00000']")
    for version, node in ((2, "two"), (3, "one"), (4, "two")):
        move(site, process, version, node)
        assert process.ask("place()") == node
        # The test's reference to the connection object follows as well.
        assert process.ask("row(held)") == node
        assert process.ask("held is connections['photos_00000']")


def test_a_transaction_ends_where_it_began(site: Site, process: SiteProcess) -> None:
    process.run("block = transaction.atomic(using='photos_00000'); block.__enter__()")
    process.run("rename('photos_00000', 'in the transaction')")
    move(site, process, 2, "two")
    assert process.ask("place()") == "in the transaction"
    # Another shard, which has no transaction, is at its new place.
    assert process.ask("place('photos_00001')") == "two"
    process.run("block.__exit__(None, None, None)")
    assert process.ask("place()") == "two"
    move(site, process, 3, "one")
    assert process.ask("place()") == "in the transaction"


def test_a_transaction_that_begins_after_the_change_is_at_the_new_place(
    site: Site, process: SiteProcess
) -> None:
    assert process.ask("place()") == "one"
    for version, node in ((2, "two"), (3, "one")):
        move(site, process, version, node)
        # Only the block has looked at the topology since.
        assert process.ask("in_atomic('photos_00000', 'photos_00000')") == node
    for version, node in ((4, "two"), (5, "one")):
        move(site, process, version, node)
        assert process.ask("in_atomic('photos', 'photos_00000')") == node


def test_shards_join_a_transaction_of_the_group_where_they_are_then(
    site: Site, process: SiteProcess
) -> None:
    process.run("block = transaction.atomic(using='photos'); block.__enter__()")
    assert process.ask("place('photos_00000')") == "one"
    move(site, process, 2, "two")
    assert process.ask("place('photos_00000')") == "one"
    assert process.ask("place('photos_00001')") == "two"
    process.run("block.__exit__(None, None, None)")
    assert process.ask("place('photos_00000')") == "two"


def test_autocommit_that_is_off_stays_until_it_is_on(site: Site, process: SiteProcess) -> None:
    process.run("transaction.set_autocommit(False, using='photos_00000')")
    assert process.ask("place()") == "one"
    move(site, process, 2, "two")
    assert process.ask("place()") == "one"
    process.run("transaction.rollback(using='photos_00000')")
    process.run("transaction.set_autocommit(True, using='photos_00000')")
    assert process.ask("place()") == "two"


def test_rows_that_are_still_read_are_read_to_their_end(site: Site, process: SiteProcess) -> None:
    process.run("more_rows('photos_00000', 500)")
    process.run("rows = iter(Place.objects.using('photos_00000').iterator(chunk_size=10))")
    process.run("answer = next(rows).node")
    move(site, process, 2, "two")
    # The next statement does not wait for them.
    assert process.ask("place()") == "two"
    assert process.ask("len(list(rows))") == 500
    assert process.ask("place()") == "two"


def test_every_thread_goes_along(site: Site, process: SiteProcess) -> None:
    process.run("first, second = Worker(), Worker()")
    process.run("answer = first(place), second(place)")
    process.run("answer = first(begin, 'photos_00000')")
    move(site, process, 2, "two")
    assert process.ask("first(place)") == "one"
    assert process.ask("second(place)") == "two"
    process.run("first(end)")
    assert process.ask("first(place)") == "two"


def test_another_thread_leaves_a_connection_alone(site: Site, process: SiteProcess) -> None:
    # Threads of a scatter use the pool of a connection that another thread opened.
    process.run("held = connections['photos_00000']; first = Worker(); answer = row(held)")
    move(site, process, 2, "two")
    process.run("first(relocation.follow, held)")
    assert process.ask("held.shard.node") == "one"
    assert process.ask("row(held)") == "two"


def test_nothing_connects_to_where_a_shard_was(file_site: Site) -> None:
    with file_site.process() as process:
        process.run("answer = place(); connections['photos_00000'].close()")
        move(file_site, process, 2, "two")
        (file_site.folder / "one").rename(file_site.folder / "gone")
        assert process.ask("in_atomic('photos_00000', 'photos_00000')") == "two"


def test_scatter_goes_along_whatever_a_transaction_keeps(site: Site, process: SiteProcess) -> None:
    assert process.ask("scattered()") == ["one"] * 4
    move(site, process, 2, "two")
    assert process.ask("scattered()") == ["two"] * 4
    move(site, process, 3, "one")
    process.run("begin('photos_00000')")
    process.run("rename('photos_00000', 'mine')")
    move(site, process, 4, "two")
    # The shard in the transaction answers from it, with its own rows.
    assert process.ask("scattered()") == ["mine", "two", "two", "two"]
    process.run("end()")
    assert process.ask("scattered()") == ["two"] * 4


def test_some_shards_move(site: Site, process: SiteProcess) -> None:
    assert process.ask("scattered()") == ["one"] * 4
    spans = [{"range": [0, 1], "primary": "one"}, {"range": [2, 3], "primary": "two"}]
    replace(site, {**document(2), "groups": {"photos": {"RANGES": spans}}})
    process.wait_version(2)
    assert process.ask("scattered()") == ["one", "one", "two", "two"]
    assert process.ask("[place(f'photos_0000{n}') for n in range(4)]") == [
        "one",
        "one",
        "two",
        "two",
    ]


def test_a_copy_and_a_second_connection_go_along(site: Site, process: SiteProcess) -> None:
    process.run("copied = connections['photos_00000'].copy()")
    process.run("second = connections.create_connection('photos_00000')")
    assert process.ask("row(copied), row(second)") == ["one", "one"]
    move(site, process, 2, "two")
    assert process.ask("row(copied), row(second)") == ["two", "two"]
    process.run("copied.close(); second.close()")


def test_an_autonomous_connection_is_not_kept_by_the_transaction_beside_it(
    site: Site, process: SiteProcess
) -> None:
    process.run("begin('photos_00000')")
    assert process.ask("row(autonomous.get('photos_00000').connection)") == "one"
    process.run("before = autonomous.get('photos_00000').connection")
    move(site, process, 2, "two")
    assert process.ask("row(autonomous.get('photos_00000').connection)") == "two"
    assert process.ask("autonomous.get('photos_00000').connection is before")
    process.run("end()")


def test_the_alias_of_the_group_asks_a_node_that_is_in_use(
    site: Site, process: SiteProcess
) -> None:
    assert process.ask("server_name()") == process.ask("node_name('one')")
    move(site, process, 2, "two")
    assert process.ask("server_name()") == process.ask("node_name('two')")


def test_what_the_directory_remembers_outlives_a_change(tmp_path: Path, request: Any) -> None:
    nodes = request.getfixturevalue("sqlite_nodes")
    site = site_with_file(tmp_path, nodes, strategy="directory")
    with site.process() as process:
        process.run("call_command('migrate', verbosity=0, database='default')")
        home = process.ask("runtime.place('photos', 7).number")
        grown = document(2)
        grown["groups"]["photos"]["RANGES"].append(
            {"range": [4, 5], "primary": "two", "open": False}
        )
        grown["groups"]["photos"]["RANGES"][0]["open"] = True
        replace(site, grown)
        process.wait_version(2)
        assert process.ask("queries('default', lambda: runtime.locate('photos', 7).number)") == [
            home, 0,
        ]  # fmt: skip
        assert process.ask("runtime.group('photos').count") == 6
        assert process.ask("runtime.strategy('photos').group.count") == 6


def test_a_pinned_session_ends_with_the_request(
    tmp_path: Path, mysql_nodes: dict[str, dict[str, Any]]
) -> None:
    for node in mysql_nodes.values():
        node["CONN_MAX_AGE"] = None
    site = site_with_file(tmp_path, mysql_nodes, group={"DATABASE_NAME": "moved_{shard:05d}"})
    with site.process() as process:
        process.run("sql('photos_00000', 'CREATE TEMPORARY TABLE mine (n INT)')")
        move(site, process, 2, "two")
        assert process.ask("place()") == "one"
        process.run("sql('photos_00000', 'SELECT n FROM mine')")
        process.run("from django.core.signals import request_finished; request_finished.send(None)")
        assert process.ask("place()") == "two"


def test_no_session_stays_at_a_node_that_nobody_uses(
    tmp_path: Path, mysql_nodes: dict[str, dict[str, Any]]
) -> None:
    for node in mysql_nodes.values():
        node["CONN_MAX_AGE"] = None
    site = site_with_file(tmp_path, mysql_nodes, group={"DATABASE_NAME": "moved_{shard:05d}"})
    with site.process() as process:
        process.run("answer = [place(f'photos_0000{n}') for n in range(4)]")
        process.run(
            "first = Worker(); answer = first(begin, 'photos_00001'), first(place, 'photos_00001')"
        )
        assert process.ask("sorted(pool.size for pool in pools() if pool.size)") == [1]
        move(site, process, 2, "two")
        assert process.ask("place()") == "two"
        process.run("first(end)")
        assert process.ask("[pool.size for pool in pools()]") == [0, 1]


def test_the_account_of_operators_is_in_no_connection(file_site: Site) -> None:
    file_site.sharded_orm["NODE_DEFAULTS"] = {"OPERATOR": {"USER": "op", "PASSWORD": "s3cret"}}
    file_site.save()
    with file_site.process() as process:
        assert process.ask("database_settings.operator_settings('one')['PASSWORD']") == "s3cret"
        for alias in ("photos_00000", "photos"):
            assert "s3cret" not in process.ask(f"repr(connections.settings[{alias!r}])")
            assert "s3cret" not in process.ask(f"repr(connections[{alias!r}].settings_dict)")
    for command in ("show", "pull"):
        assert "s3cret" not in file_site.topology(command).out
