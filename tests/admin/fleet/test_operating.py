"""Operating: open and close ranges, set weights, go back to a version."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.admin.fleet.site import ADMIN, FIND, MAP, TOPOLOGY, Site, serving
from tests.integration.shards.conftest import Fleet

SET = f"{MAP}range/photos/4-7/set/"
RANGE = f"{MAP}range/photos/4-7/"
YES = {"confirmed": "yes"}


@pytest.fixture(scope="module")
def writable(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A site with a topology that can be written."""
    folder = tmp_path_factory.mktemp("writable")
    shutil.copytree(sqlite_template, folder / "fleet")
    topology = str(folder / "topology.json")
    with serving(Fleet(folder / "fleet"), FLEET_TOPOLOGY=topology, FLEET_CACHED="1") as site:
        yield site


def logged(site: Site) -> list[str]:
    messages: list[str] = site.run(
        "from django.contrib.admin.models import LogEntry\n"
        "result = [f'{one.user} {one.object_repr}: {one.change_message} {one.get_admin_url()}'"
        " for one in LogEntry.objects.order_by('pk')]"
    )
    return messages


def test_a_range_is_opened_after_a_question(writable: Site) -> None:
    question = writable.post(SET, do="open")
    assert question.status == 200
    assert "Open range photos 4-7 (4 shards on two) for new keys?" in question.text
    assert "closed" in writable.get(RANGE).text  # Nothing is changed before the confirmation.
    response = writable.post(SET, do="open", **YES)
    assert (response.status, response.location) == (302, RANGE)
    assert response.messages == ["photos 4-7: opened for new keys (topology version 2)"]
    assert "open: 50 % of new keys" in writable.get(RANGE).text
    assert logged(writable)[-1] == (
        "boss photos 4-7: opened for new keys (topology version 2)"
        " /admin/sharded_orm/shardmap/photos%204-7/change/"
    )
    followed = writable.get("/admin/sharded_orm/shardmap/photos%204-7/change/")
    assert followed.location == RANGE

    weighted = writable.post(SET, do="weight", weight="3", **YES)
    assert "weight set from 1 to 3" in weighted.messages[0]
    assert "open: 75 % of new keys Weight 3 " in writable.get(RANGE).text
    closed = writable.post(SET, do="close", **YES)
    assert "closed for new keys" in closed.messages[0]
    assert "New keys closed Weight 3" in writable.get(RANGE).text


@pytest.mark.parametrize(
    ("path", "data", "message"),
    [
        (SET, {"do": "weight", "weight": "much"}, "A weight is a number from 0 to 1,000,000"),
        (SET, {"do": "weight", "weight": "-1"}, "A weight is a number from 0 to"),
        (SET, {"do": "weight", "weight": "nan"}, "A weight is a number from 0 to"),
        (SET, {"do": "weight", "weight": "1e308"}, "A weight is a number from 0 to"),
        (SET, {"do": "drop"}, "'drop' is nothing that can be done to a range"),
        (f"{MAP}range/events/0-0/set/", {"do": "close"}, "never chooses a shard"),
        # Refused: no range would be left for new keys.
        (f"{MAP}range/pins/0-1/set/", {"do": "close"}, "no range is open for new keys"),
    ],
)
def test_what_cannot_be_is_refused(
    writable: Site, path: str, data: dict[str, str], message: str
) -> None:
    before = writable.get(TOPOLOGY).text
    answer = writable.post(path, **data, **YES)
    assert answer.status == 302
    assert message in answer.messages[0]
    assert writable.get(TOPOLOGY).text == before


def test_only_ranges_that_exist_can_be_operated(writable: Site) -> None:
    assert writable.post(f"{MAP}range/photos/4-6/set/", do="open", **YES).status == 404
    assert writable.post(f"{MAP}range/nothing/0-1/set/", do="open", **YES).status == 404


def test_the_topology_tells_its_history_and_goes_back(writable: Site) -> None:
    writable.post(f"{MAP}range/photos/0-3/set/", do="weight", weight="2", **YES)
    page = writable.get(TOPOLOGY)
    assert "range photos 0-3: weight 2.0" in page.text
    assert "Processes that are connected to the source" in page.text
    version = writable.run("from sharded_orm import runtime; result = runtime.document().version")
    assert f"Holds version {version}" in page.text

    difference = writable.get(f"{TOPOLOGY}diff/?from={version - 1}&to={version}")
    assert "group 'photos': range [0, 3]: weight 1 (the default) becomes 2" in difference.text
    backwards = writable.get(f"{TOPOLOGY}diff/?from={version}&to={version - 1}")
    assert "weight 2 becomes 1 (the default)" in backwards.text

    earlier = f"{TOPOLOGY}{version - 1}/rollback/"
    question = writable.post(earlier)
    assert "range [0, 3]: weight 2 becomes 1 (the default)" in question.text
    response = writable.post(earlier, expected=str(version), **YES)
    assert response.messages == [
        f"version {version + 1}: content of version {version - 1} published once more"
    ]
    assert f"back to version {version - 1}, by boss in the admin" in writable.get(TOPOLOGY).text
    log = logged(writable)[-1]
    assert log.endswith(f"/topologyversion/{version + 1}/change/")
    assert writable.get(f"{TOPOLOGY}{version + 1}/change/").status == 200


def test_going_back_does_not_undo_what_came_in_between(writable: Site) -> None:
    here = "from sharded_orm import runtime; result = runtime.document().version"
    weights = (
        "from sharded_orm import runtime\n"
        "result = [one.weight for one in runtime.topology().groups['photos'].ranges]"
    )
    writable.post(f"{MAP}range/photos/0-3/set/", do="weight", weight="5", **YES)
    version = writable.run(here)
    earlier = f"{TOPOLOGY}{version - 1}/rollback/"
    question = writable.post(earlier)
    assert f'name="expected" value="{version}"' in question.body
    # Somebody else publishes before the confirmation.
    writable.post(f"{MAP}range/photos/0-3/set/", do="weight", weight="6", **YES)
    again = writable.post(earlier, expected=str(version), **YES)
    assert again.status == 200
    assert "It has changed since you were asked." in again.text
    assert "weight 6 becomes" in again.text
    assert writable.run(weights)[0] == 6
    response = writable.post(earlier, expected=str(version + 1), **YES)
    assert f"version {version + 2}: content of" in response.messages[0]
    # After the last check, the source refuses the version.
    refused = writable.run(
        "from sharded_orm.exceptions import TopologyConflict\n"
        "from sharded_orm.operations import topology\n"
        "try:\n"
        f"    topology.rollback({version}, expected={version})\n"
        "except TopologyConflict as exc:\n"
        "    result = str(exc)"
    )
    assert f"holds version {version + 2} by now, not {version}" in refused


def test_numbers_that_are_too_long_name_nothing(writable: Site) -> None:
    many = "9" * 4400
    for path in (
        f"{MAP}photos%200-{many}/change/",
        f"{MAP}photos%200-{many[:4000]}/change/",
        f"{TOPOLOGY}{many}/change/",
        f"{TOPOLOGY}{many[:30]}/change/",
        f"{MAP}range/photos/0-{many[:4000]}/",
        f"{ADMIN}/operationrun/{many[:30]}/change/",
    ):
        assert writable.get(path).status == 404, path[:60]
    assert writable.post(f"{TOPOLOGY}{many[:30]}/rollback/", **YES).status == 404
    assert writable.get(f"{TOPOLOGY}diff/?from=1&to={many[:30]}").messages == [
        "Choose two versions to compare."
    ]


def test_objects_without_rows_are_looked_for_in_vain(writable: Site) -> None:
    for model in ("shardmap", "topologyversion"):
        number = writable.run(
            "from django.contrib.contenttypes.models import ContentType\n"
            f"result = ContentType.objects.get(model={model!r}).pk"
        )
        assert writable.get(f"/admin/r/{number}/1/").status == 404


def test_versions_that_are_not_kept(writable: Site) -> None:
    assert "keeps no version 999" in writable.get(f"{TOPOLOGY}999/change/").text
    assert writable.get(f"{TOPOLOGY}x/change/").status == 404
    assert writable.get(f"{TOPOLOGY}diff/?from=x&to=").messages == [
        "Choose two versions to compare."
    ]
    assert "keeps no version" in writable.post(f"{TOPOLOGY}999/rollback/", **YES).messages[0]


def test_a_source_that_does_not_answer_is_told(writable: Site) -> None:
    path = writable.run(
        "from django.conf import settings\n"
        "result = settings.SHARDED_ORM['TOPOLOGY']['OPTIONS']['PATH']"
    )
    trouble = Path(path).with_suffix(".trouble")
    trouble.write_text("down")
    try:
        page = writable.get(TOPOLOGY)
        assert "the file does not answer" in page.text
        assert "Holds not known" in page.text
        assert "does not answer" in writable.post(SET, do="open", **YES).messages[0]
        assert writable.get(MAP).status == 200
    finally:
        trouble.unlink()


def test_a_source_that_hangs_keeps_nobody(writable: Site) -> None:
    path = writable.run(
        "from django.conf import settings\n"
        "result = settings.SHARDED_ORM['TOPOLOGY']['OPTIONS']['PATH']"
    )
    version = writable.run("from sharded_orm import runtime; result = runtime.document().version")
    trouble = Path(path).with_suffix(".trouble")
    trouble.write_text("slow")
    try:
        page = writable.get(f"{TOPOLOGY}diff/?from=1&to=2")
        assert "no answer within 3 seconds" in page.text
        answer = writable.post(SET, do="weight", weight="7", **YES)
        assert answer.status == 302
        assert "it is not known whether the change was published" in answer.messages[0]
    finally:
        trouble.unlink()
    # In this case, it was published.
    writable.run(
        "import threading\n"
        "from tests.patience import PATIENCE\n"
        "for one in threading.enumerate():\n"
        "    if one.name.startswith('service '): one.join(PATIENCE)"
    )
    assert f"Holds version {version + 1}" in writable.get(TOPOLOGY).text


def test_what_is_cached_of_a_key_is_forgotten(writable: Site) -> None:
    find = f"{FIND}?model=cached.CachedPhoto&field=user_id&value=41"
    assert 'value="Forget what is cached' in writable.get(find).body
    forget = f"{MAP}forget/"
    data = {"model": "cached.CachedPhoto", "field": "user_id", "value": "41"}
    question = writable.post(forget, **data)
    assert "Forget what is cached of user_id 41 in group photos?" in question.text
    message = writable.post(forget, **data, **YES).messages[0]
    assert "forgot what was cached of user_id 41: cached.CachedAlbum, " in message
    # The key has no shard yet.
    assert writable.get(f"{MAP}photos/change/").location == f"{MAP}?group=photos"


def test_a_source_that_cannot_be_written_tells_the_change(site: Site) -> None:
    page = site.post(SET, do="open")
    assert page.status == 200
    assert "Nothing was changed" in page.text
    assert "Make this change there" in page.text
    assert "range [4, 7]: open False becomes True" in page.text
    assert not [entry for entry in logged(site) if "photos 4-7" in entry]


# ##### Permissions #####


def test_looking_is_not_operating(writable: Site) -> None:
    viewer = writable.user("viewer", "view_shardmap", "view_topologyversion")
    page = writable.get(RANGE, viewer)
    assert page.status == 200
    assert 'value="Open for new keys' in writable.get(RANGE).body
    assert "for new keys …" not in page.body
    assert '<form method="post" action="/admin/sharded_orm' not in page.body
    for path in (SET, f"{MAP}forget/", f"{TOPOLOGY}1/rollback/"):
        assert writable.post(path, viewer, do="open", **YES).status == 403


def test_nothing_is_operated_by_get_or_without_a_token(writable: Site) -> None:
    for path in (SET, f"{MAP}forget/", f"{TOPOLOGY}1/rollback/"):
        assert writable.get(f"{path}?do=open&confirmed=yes").status == 405
        assert writable.post(path, csrf=True, do="open", **YES).status == 403


PAGES = [
    (MAP, "view_shardmap"),
    (FIND, "view_shardmap"),
    (f"{MAP}shard/photos_00003/", "view_shardmap"),
    (RANGE, "view_shardmap"),
    (f"{MAP}photos%204-7/change/", "view_shardmap"),
    (f"{ADMIN}/ticketsequence/", "view_ticketsequence"),
    (f"{ADMIN}/operationrun/", "view_operationrun"),
    (f"{ADMIN}/operationrun/1/change/", "view_operationrun"),
    (f"{ADMIN}/operationrun/1/progress/", "view_operationrun"),
    (TOPOLOGY, "view_topologyversion"),
    (f"{TOPOLOGY}1/change/", "view_topologyversion"),
]


@pytest.mark.parametrize(("path", "permission"), PAGES)
def test_each_page_needs_its_permission(writable: Site, path: str, permission: str) -> None:
    assert writable.get(path, None).location.startswith("/admin/login/")
    others = {name for _, name in PAGES} - {permission}
    assert writable.get(path, writable.user("stranger", *others)).status == 403
    assert writable.get(path, writable.user("friend", permission)).status in (200, 302)


def test_the_index_names_what_one_may_see(writable: Site) -> None:
    text = writable.get("/admin/", writable.user("watcher", "view_operationrun")).text
    assert "Operations View" in text
    assert "Topology" not in text
