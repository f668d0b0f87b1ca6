"""Pages for users who may look into some groups only."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from sharded_orm import conf
from sharded_orm.exceptions import InvalidConfiguration
from tests.admin.fleet.site import FIND, MAP, RUNS, TICKETS, TOPOLOGY, Site, serving
from tests.integration.shards.conftest import Fleet

FLEET = ("view_shardmap", "change_shardmap", "view_operationrun", "view_topologyversion")


@pytest.fixture(scope="module")
def restricted(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("restricted")
    shutil.copytree(sqlite_template, folder / "fleet")
    with serving(
        Fleet(folder / "fleet"),
        FLEET_SETTING='{"ADMIN": {"GROUP_PERMISSIONS": true}}',
        FLEET_TOPOLOGY=str(folder / "topology.json"),
    ) as site:
        site.run(
            "from django.core.management import call_command; call_command('tickets', 'create')"
        )
        yield site


CHANGE = """
from sharded_orm.operations import topology
def edit(document):
    content = document.content()
    for group in {groups!r}:
        content["groups"][group]["RANGES"][0]["weight"] = {weight}
    return type(document).from_content(content)
result = topology.change(edit, {comment!r}).version
"""


def change(site: Site, weight: int, *groups: str, comment: str = "") -> int:
    """Publish another weight of a group; return the new version."""
    code = CHANGE.replace("{groups!r}", repr(groups)).replace("{comment!r}", repr(comment))
    version: int = site.run(code.replace("{weight}", str(weight)))
    return version


def test_a_group_that_is_not_permitted_is_not_seen(restricted: Site) -> None:
    user = restricted.user("limited", "access_photos", *FLEET)
    page = restricted.get(MAP, user)
    assert len(page.cells("current")) == 8
    assert "events" not in page.text and "pins" not in page.text
    assert restricted.get(f"{MAP}?group=events", user).messages == ["There is no group 'events'."]
    for path in ("shard/events_00000/", "range/events/0-0/", "range/nothing/0-0/"):
        assert restricted.get(MAP + path, user).status == 403
    assert restricted.post(f"{MAP}range/events/0-0/set/", user, do="open").status == 403
    assert restricted.get(f"{FIND}?model=Event&value=x", user).status == 403
    assert "Event" not in restricted.get(FIND, user).text
    assert restricted.get(f"{MAP}shard/photos_00003/", user).status == 200
    runs = restricted.get(RUNS, user).text
    assert "migrate photos" in runs and "migrate events" not in runs
    (other,) = restricted.run(
        "from sharded_orm.models import OperationRun\n"
        "result = list(OperationRun.objects.filter(subject='events').values_list('pk', flat=True))"
    )
    assert restricted.get(f"{RUNS}{other}/change/", user).status == 404
    assert restricted.get(TOPOLOGY, user).status == 200


def test_a_user_without_any_group_sees_an_empty_map(restricted: Site) -> None:
    page = restricted.get(MAP, restricted.user("nobody", *FLEET))
    assert page.status == 200
    assert "There are no shards that you may look at." in page.text


def test_nobody_goes_back_in_a_group_that_is_not_permitted(restricted: Site) -> None:
    user = restricted.user("limited", "access_photos", *FLEET, "change_topologyversion")
    change(restricted, 2, "photos")
    version = change(restricted, 3, "photos", "pins", comment="the plan for pins")
    weight = (
        "from sharded_orm import runtime\n"
        "result = runtime.topology().groups['pins'].ranges[0].weight"
    )
    confirmation = {"confirmed": "yes", "expected": str(version)}
    for posted in ({}, confirmation):
        answer = restricted.post(f"{TOPOLOGY}{version - 1}/rollback/", user, **posted)
        assert answer.status == 302
        assert "differs in groups that you may not look into" in answer.messages[0]
    assert restricted.run(weight) == 3
    for path in (TOPOLOGY, f"{TOPOLOGY}{version}/change/"):
        text = restricted.get(path, user).text
        assert "pins" not in text and "plan" not in text
        assert "the plan for pins" in restricted.get(path).text
    # Allowed, if all groups that differ are permitted.
    version = change(restricted, 4, "photos")
    confirmation["expected"] = str(version)
    response = restricted.post(f"{TOPOLOGY}{version - 1}/rollback/", user, **confirmation)
    assert f"version {version + 1}" in response.messages[0]


def test_a_group_that_this_process_refuses_is_told_to_superusers(restricted: Site) -> None:
    path = Path(
        restricted.run(
            "from django.conf import settings\n"
            "result = settings.SHARDED_ORM['TOPOLOGY']['OPTIONS']['PATH']"
        )
    )
    original = path.read_text()
    content = json.loads(original)
    content["version"] += 1
    ranges = [{"range": [0, 0], "primary": "nowhere"}]
    content["groups"]["fresh"] = {"STRATEGY": "modulo", "RANGES": ranges}
    path.write_text(json.dumps(content))
    try:
        assert "group 'fresh': new" in restricted.get(TOPOLOGY).text
        user = restricted.user("limited", "access_photos", *FLEET)
        assert "fresh" not in restricted.get(TOPOLOGY, user).text
    finally:
        path.write_text(original)


def test_what_is_about_several_groups_is_not_shown(restricted: Site) -> None:
    pk = restricted.run(
        "from sharded_orm.models import OperationRun, OperationStep\n"
        "run = OperationRun.objects.create(kind='promote', subject='fleet', state='failed',"
        " arguments={'node': 'one', 'ranges': [['pins', 0, 1]]})\n"
        "for alias in ('photos_00003', 'pins_00000'):\n"
        "    OperationStep.objects.create(run=run, alias=alias, state='failed', error='x')\n"
        "result = run.pk"
    )
    user = restricted.user("limited", "access_photos", *FLEET)
    assert f"promote fleet, run {pk}" in restricted.get(RUNS).text
    assert "promote" not in restricted.get(RUNS, user).text
    assert restricted.get(f"{RUNS}{pk}/change/", user).status == 404
    assert restricted.get(f"{RUNS}{pk}/progress/", user).status == 404
    shard = f"{MAP}shard/photos_00003/"
    assert "promote fleet" in restricted.get(shard).text
    page = restricted.get(shard, user).text
    assert "promote fleet" not in page and "migrate photos" in page
    page_text = restricted.get(f"{FIND}?model=Nope&value=1", user).text
    assert "There is no sharded model 'Nope'." in page_text and "Event" not in page_text


def test_sequences_of_a_group_that_is_not_permitted(restricted: Site) -> None:
    restricted.run(
        "from django.db import connections\n"
        "with connections['tickets_1'].cursor() as cursor:\n"
        "    cursor.execute(\"DELETE FROM sharded_orm_sequence WHERE name = 'photos'\")"
    )
    page_text = restricted.get(TICKETS).text
    assert "photos" in page_text and "has no sequence 'photos'" in page_text
    user = restricted.user("limited", "access_events", *FLEET, "view_ticketsequence")
    page = restricted.get(TICKETS, user).text
    assert "tickets_1 State answers" in page and "photos" not in page


def test_superusers_see_all(restricted: Site) -> None:
    assert len(restricted.get(MAP).cells("current")) == 18


def test_permissions_are_made_once(restricted: Site) -> None:
    names = restricted.run(
        "from django.core.management import call_command\n"
        "from django.contrib.auth.models import Permission\n"
        "call_command('migrate', database='default', verbosity=0)\n"
        "found = Permission.objects.filter(codename__startswith='access_').order_by('codename')\n"
        "result = [f'{one.content_type.model} {one.codename}: {one.name}' for one in found]"
    )
    assert names == [
        f"shardmap access_{name}: Can access shards of {name}"
        for name in ("archive", "events", "photos", "pins", "visits")
    ]


def test_no_permission_is_made_where_a_router_forbids_it(restricted: Site) -> None:
    outcomes = restricted.run(
        "from django.apps import apps\n"
        "from django.contrib.auth.models import Permission\n"
        "from django.test import override_settings\n"
        "from sharded_orm.models.after_migrate.permissions import after_migrate\n"
        "class Elsewhere:\n"
        "    def allow_migrate(self, db, app_label, **hints):\n"
        "        return False if app_label == 'auth' else None\n"
        "pins = Permission.objects.filter(codename='access_pins')\n"
        "pins.delete()\n"
        "with override_settings(DATABASE_ROUTERS=[Elsewhere()]):\n"
        "    after_migrate(apps.get_app_config('sharded_orm'))\n"
        "result = [pins.exists()]\n"
        "after_migrate(apps.get_app_config('sharded_orm'))\n"
        "result.append(pins.exists())"
    )
    assert outcomes == [False, True]


def test_without_the_setting_there_are_none(site: Site) -> None:
    assert not site.run(
        "from django.contrib.auth.models import Permission\n"
        "result = Permission.objects.filter(codename__startswith='access_').exists()"
    )
    user = site.user("plain", "view_shardmap")
    assert len(site.get(MAP, user).cells("current")) == 18


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ([], "ADMIN must be a dict, not list"),
        ({"PERMISSIONS": True}, "ADMIN: unknown key 'PERMISSIONS'; valid keys are"),
        ({"GROUP_PERMISSIONS": "no"}, "ADMIN: GROUP_PERMISSIONS must be True or False, not 'no'"),
    ],
)
def test_a_wrong_setting_is_refused(setting: object, problem: str) -> None:
    with pytest.raises(InvalidConfiguration, match=problem):
        conf.parse({"ADMIN": setting})


def test_a_group_without_a_possible_permission_is_refused() -> None:
    group = {
        "STRATEGY": "modulo",
        "RANGES": [{"range": (0, 0), "primary": "one"}],
    }
    setting = {
        "NODES": {"one": {"ENGINE": "sharded_orm.backends.sqlite3", "NAME": "/one"}},
        "GROUPS": {"g" * 94: group},
        "ADMIN": {"GROUP_PERMISSIONS": True},
    }
    with pytest.raises(InvalidConfiguration, match="more than 93 characters"):
        conf.parse(setting)
    assert conf.parse({**setting, "GROUPS": {"g" * 93: group}}).admin.group_permissions
