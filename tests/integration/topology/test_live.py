"""A change in running processes: what was begun ends where it was begun, the rest moves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.topology.conftest import scene_with_file
from tests.integration.topology.scene import Scene, Site, document
from tests.integration.topology.test_file import replace


@pytest.fixture(params=["sqlite", "mysql"])
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Scene:
    nodes = request.getfixturevalue(f"{request.param}_nodes")
    names = {} if request.param == "sqlite" else {"DATABASE_NAME": "moved_{shard:05d}"}
    return scene_with_file(tmp_path, nodes, group=names)


@pytest.fixture
def site(scene: Scene) -> Iterator[Site]:
    with scene.site() as started:
        yield started


def move(scene: Scene, site: Site, version: int, primary: str) -> None:
    replace(scene, document(version, primary))
    site.wait_version(version)


def test_autocommit_goes_to_the_new_place_and_back(scene: Scene, site: Site) -> None:
    site.run("held = connections['photos_00000']")
    for version, node in ((2, "two"), (3, "one"), (4, "two")):
        move(scene, site, version, node)
        assert site.ask("place()") == node
        # Who held the connection object goes along.
        assert site.ask("row(held)") == node
        assert site.ask("held is connections['photos_00000']")


def test_a_transaction_ends_where_it_began(scene: Scene, site: Site) -> None:
    site.run("block = transaction.atomic(using='photos_00000'); block.__enter__()")
    site.run("rename('photos_00000', 'in the transaction')")
    move(scene, site, 2, "two")
    assert site.ask("place()") == "in the transaction"
    # Another shard, which has no transaction, is at its new place.
    assert site.ask("place('photos_00001')") == "two"
    site.run("block.__exit__(None, None, None)")
    assert site.ask("place()") == "two"
    move(scene, site, 3, "one")
    assert site.ask("place()") == "in the transaction"


def test_a_transaction_that_begins_after_the_change_is_at_the_new_place(
    scene: Scene, site: Site
) -> None:
    assert site.ask("place()") == "one"
    for version, node in ((2, "two"), (3, "one")):
        move(scene, site, version, node)
        # Nothing has looked at the topology since, but the block.
        assert site.ask("in_atomic('photos_00000', 'photos_00000')") == node
    for version, node in ((4, "two"), (5, "one")):
        move(scene, site, version, node)
        assert site.ask("in_atomic('photos', 'photos_00000')") == node


def test_shards_join_a_transaction_of_the_group_where_they_are_then(
    scene: Scene, site: Site
) -> None:
    site.run("block = transaction.atomic(using='photos'); block.__enter__()")
    assert site.ask("place('photos_00000')") == "one"
    move(scene, site, 2, "two")
    assert site.ask("place('photos_00000')") == "one"
    assert site.ask("place('photos_00001')") == "two"
    site.run("block.__exit__(None, None, None)")
    assert site.ask("place('photos_00000')") == "two"


def test_autocommit_that_is_off_stays_until_it_is_on(scene: Scene, site: Site) -> None:
    site.run("transaction.set_autocommit(False, using='photos_00000')")
    assert site.ask("place()") == "one"
    move(scene, site, 2, "two")
    assert site.ask("place()") == "one"
    site.run("transaction.rollback(using='photos_00000')")
    site.run("transaction.set_autocommit(True, using='photos_00000')")
    assert site.ask("place()") == "two"


def test_rows_that_are_still_read_are_read_to_their_end(scene: Scene, site: Site) -> None:
    site.run("more_rows('photos_00000', 500)")
    site.run("rows = iter(Place.objects.using('photos_00000').iterator(chunk_size=10))")
    site.run("answer = next(rows).node")
    move(scene, site, 2, "two")
    # The next statement does not wait for them.
    assert site.ask("place()") == "two"
    assert site.ask("len(list(rows))") == 500
    assert site.ask("place()") == "two"


def test_every_thread_goes_along(scene: Scene, site: Site) -> None:
    site.run("first, second = Worker(), Worker()")
    site.run("answer = first(place), second(place)")
    site.run("answer = first(begin, 'photos_00000')")
    move(scene, site, 2, "two")
    assert site.ask("first(place)") == "one"
    assert site.ask("second(place)") == "two"
    site.run("first(end)")
    assert site.ask("first(place)") == "two"


def test_another_thread_leaves_a_connection_alone(scene: Scene, site: Site) -> None:
    # Workers of a scatter ask for the pool of a wrapper that another thread made.
    site.run("held = connections['photos_00000']; first = Worker(); answer = row(held)")
    move(scene, site, 2, "two")
    site.run("first(relocation.follow, held)")
    assert site.ask("held.shard.node") == "one"
    assert site.ask("row(held)") == "two"


def test_nothing_connects_to_where_a_shard_was(file_scene: Scene) -> None:
    with file_scene.site() as site:
        site.run("answer = place(); connections['photos_00000'].close()")
        move(file_scene, site, 2, "two")
        (file_scene.folder / "one").rename(file_scene.folder / "gone")
        assert site.ask("in_atomic('photos_00000', 'photos_00000')") == "two"


def test_scatter_goes_along_whatever_a_transaction_keeps(scene: Scene, site: Site) -> None:
    assert site.ask("scattered()") == ["one"] * 4
    move(scene, site, 2, "two")
    assert site.ask("scattered()") == ["two"] * 4
    move(scene, site, 3, "one")
    site.run("begin('photos_00000')")
    site.run("rename('photos_00000', 'mine')")
    move(scene, site, 4, "two")
    # The shard in the transaction answers from it, with the rows of its own.
    assert site.ask("scattered()") == ["mine", "two", "two", "two"]
    site.run("end()")
    assert site.ask("scattered()") == ["two"] * 4


def test_some_shards_move(scene: Scene, site: Site) -> None:
    assert site.ask("scattered()") == ["one"] * 4
    spans = [{"range": [0, 1], "primary": "one"}, {"range": [2, 3], "primary": "two"}]
    replace(scene, {**document(2), "groups": {"photos": {"RANGES": spans}}})
    site.wait_version(2)
    assert site.ask("scattered()") == ["one", "one", "two", "two"]
    assert site.ask("[place(f'photos_0000{n}') for n in range(4)]") == ["one", "one", "two", "two"]


def test_a_copy_and_a_second_connection_go_along(scene: Scene, site: Site) -> None:
    site.run("copied = connections['photos_00000'].copy()")
    site.run("second = connections.create_connection('photos_00000')")
    assert site.ask("row(copied), row(second)") == ["one", "one"]
    move(scene, site, 2, "two")
    assert site.ask("row(copied), row(second)") == ["two", "two"]
    site.run("copied.close(); second.close()")


def test_an_autonomous_connection_is_not_kept_by_the_transaction_beside_it(
    scene: Scene, site: Site
) -> None:
    site.run("begin('photos_00000')")
    assert site.ask("row(autonomous.get('photos_00000').connection)") == "one"
    site.run("before = autonomous.get('photos_00000').connection")
    move(scene, site, 2, "two")
    assert site.ask("row(autonomous.get('photos_00000').connection)") == "two"
    assert site.ask("autonomous.get('photos_00000').connection is before")
    site.run("end()")


def test_the_alias_of_the_group_asks_a_node_that_is_in_use(scene: Scene, site: Site) -> None:
    assert site.ask("server_name()") == site.ask("node_name('one')")
    move(scene, site, 2, "two")
    assert site.ask("server_name()") == site.ask("node_name('two')")


def test_what_the_directory_remembers_outlives_a_change(tmp_path: Path, request: Any) -> None:
    nodes = request.getfixturevalue("sqlite_nodes")
    scene = scene_with_file(tmp_path, nodes, strategy="directory")
    with scene.site() as site:
        site.run("call_command('migrate', verbosity=0, database='default')")
        home = site.ask("runtime.place('photos', 7).number")
        grown = document(2)
        grown["groups"]["photos"]["RANGES"].append(
            {"range": [4, 5], "primary": "two", "open": False}
        )
        grown["groups"]["photos"]["RANGES"][0]["open"] = True
        replace(scene, grown)
        site.wait_version(2)
        assert site.ask("queries('default', lambda: runtime.locate('photos', 7).number)") == [
            home, 0,
        ]  # fmt: skip
        assert site.ask("runtime.group('photos').count") == 6
        assert site.ask("runtime.strategy('photos').group.count") == 6


def test_a_pinned_session_ends_with_the_request(
    tmp_path: Path, mysql_nodes: dict[str, dict[str, Any]]
) -> None:
    for node in mysql_nodes.values():
        node["CONN_MAX_AGE"] = None
    scene = scene_with_file(tmp_path, mysql_nodes, group={"DATABASE_NAME": "moved_{shard:05d}"})
    with scene.site() as site:
        site.run("sql('photos_00000', 'CREATE TEMPORARY TABLE mine (n INT)')")
        move(scene, site, 2, "two")
        assert site.ask("place()") == "one"
        site.run("sql('photos_00000', 'SELECT n FROM mine')")
        site.run("from django.core.signals import request_finished; request_finished.send(None)")
        assert site.ask("place()") == "two"


def test_no_session_stays_at_a_node_that_nobody_uses(
    tmp_path: Path, mysql_nodes: dict[str, dict[str, Any]]
) -> None:
    for node in mysql_nodes.values():
        node["CONN_MAX_AGE"] = None
    scene = scene_with_file(tmp_path, mysql_nodes, group={"DATABASE_NAME": "moved_{shard:05d}"})
    with scene.site() as site:
        site.run("answer = [place(f'photos_0000{n}') for n in range(4)]")
        site.run(
            "first = Worker(); answer = first(begin, 'photos_00001'), first(place, 'photos_00001')"
        )
        assert site.ask("sorted(pool.size for pool in pools() if pool.size)") == [1]
        move(scene, site, 2, "two")
        assert site.ask("place()") == "two"
        site.run("first(end)")
        assert site.ask("[pool.size for pool in pools()]") == [0, 1]


def test_the_account_of_operators_is_in_no_connection(file_scene: Scene) -> None:
    file_scene.sharded_orm["NODE_DEFAULTS"] = {"OPERATOR": {"USER": "op", "PASSWORD": "s3cret"}}
    file_scene.save()
    with file_scene.site() as site:
        assert site.ask("runtime.operator_settings('one')['PASSWORD']") == "s3cret"
        for alias in ("photos_00000", "photos"):
            assert "s3cret" not in site.ask(f"repr(connections.settings[{alias!r}])")
            assert "s3cret" not in site.ask(f"repr(connections[{alias!r}].settings_dict)")
    for command in ("show", "pull"):
        assert "s3cret" not in file_scene.topology(command).out
