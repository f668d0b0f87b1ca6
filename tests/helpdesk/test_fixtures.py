"""Fixtures: the rows of one tenant or of all, dumped, removed and loaded again."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command
from django.db.models import Model
from django.test import TestCase

from tests.helpdesk.conftest import DATABASES, Desk
from tests.helpdesk.models import Attachment, Case, Message, Profile, Tag, Tenant

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]

OF_TENANT: tuple[type[Model], ...] = (Attachment, Message, Case, Tag)
#: JSON has milliseconds only.
START = datetime(2026, 1, 1, tzinfo=UTC)
Contents = dict[str, list[Any]]


def fill(desk: Desk) -> None:
    case = desk.case(f"Case of {desk.tenant}", assignee=desk.agent, opened_at=START)
    case.tags.add(desk.tag)
    message = Message.objects.create(tenant=desk.tenant, case=case, text="It burns", sent_at=START)
    Attachment.objects.create(tenant=desk.tenant, message=message, name="smoke.png", size=7)
    Profile.objects.create(user=desk.agent.user, signature=f"Agent of {desk.tenant}")


def contents() -> Contents:
    """All rows of the tenants, with their shards."""
    rows: Contents = {
        model.__name__: sorted(
            (row._state.db, *(getattr(row, field.attname) for field in row._meta.concrete_fields))
            for row in model.objects.scatter()  # type: ignore[attr-defined]
        )
        for model in OF_TENANT
    }
    cases = Case.objects.scatter().prefetch_related("tags")
    rows["tags"] = sorted((case.pk, tag.pk) for case in cases for tag in case.tags.all())
    return rows


def remove(rows: Any) -> None:
    for model in OF_TENANT:
        rows(model).delete()


@pytest.fixture
def desks(desk: Desk, neighbour: Desk, other: Desk) -> tuple[Desk, ...]:
    """Two tenants on one shard, and one on the other node."""
    for each in (desk, neighbour, other):
        fill(each)
    return desk, neighbour, other


def test_all_shards(desks: tuple[Desk, ...], tmp_path: Path) -> None:
    before, profiles = contents(), list(Profile.objects.scatter().values_list().order_by("pk"))
    file = tmp_path / "all.json"
    call_command("dumpdata", "helpdesk", output=str(file))
    remove(lambda model: model.objects.scatter())
    Profile.objects.scatter().delete()
    assert not any(contents().values())
    call_command("loaddata", str(file), verbosity=0)
    assert contents() == before
    assert list(Profile.objects.scatter().values_list().order_by("pk")) == profiles


def test_one_tenant(desks: tuple[Desk, ...], tmp_path: Path) -> None:
    desk, neighbour, other = desks
    before, file = contents(), tmp_path / "tenant.json"
    models = [f"helpdesk.{model.__name__}" for model in OF_TENANT]
    call_command("dumpdata", *models, key=str(desk.tenant.pk), output=str(file))
    remove(lambda model: model.objects.filter(tenant=desk.tenant))
    assert [row[1] for row in contents()["Case"]] == [neighbour.tenant.pk, other.tenant.pk]
    call_command("loaddata", str(file), verbosity=0)
    assert contents() == before


class TestFixturesOfATestCase(TestCase):
    """Each row of a fixture is on its shard before the test begins."""

    databases = set(DATABASES)
    fixtures = ["tenants.json"]

    def test_rows(self) -> None:
        tenants = Tenant.objects.order_by("pk")
        assert [tenant.slug for tenant in tenants] == ["acme", "globex"]
        for tenant in tenants:
            case = tenant.cases.get()
            assert case.subject == f"Case of {tenant.name}"
            assert [tag.name for tag in case.tags.all()] == ["urgent"]
            assert [message.text for message in case.messages.all()] == ["It burns"]
        assert User.objects.get().profile.signature == "Yours, A."

    def test_rows_are_there_again_after_a_test_that_deletes_them(self) -> None:
        for model in OF_TENANT:
            assert model.objects.scatter().delete()[0]  # type: ignore[attr-defined]
