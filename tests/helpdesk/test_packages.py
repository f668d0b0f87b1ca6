"""The project itself, factory_boy, sitemaps, sessions and a sharded profile."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import pytest
from django.core.checks import run_checks
from django.core.management import call_command
from django.test import Client

from tests.helpdesk import factories
from tests.helpdesk.conftest import DATABASES, Desk
from tests.helpdesk.models import Case, Profile, Tag, Tenant

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]


def test_the_project_is_in_order(db: None) -> None:
    # Its cache is in the memory of this process only.
    assert {problem.id for problem in run_checks()} == {"sharded_orm.W030"}
    call_command("makemigrations", check=True, dry_run=True, verbosity=0)


class TestFactories:
    def test_children_are_on_the_shard_of_their_parents(self) -> None:
        attachment = factories.AttachmentFactory(message__case__tenant__slug="acme")
        acme = Tenant.objects.get()
        assert attachment.message.case.tenant == attachment.tenant == acme
        assert acme.attachments.get().message.case.tenant_id == acme.pk

    def test_parents_with_children(self) -> None:
        tenant = factories.TenantFactory()
        thread = factories.ThreadFactory(tenant=tenant, tags=["new", "urgent"])
        assert thread.messages.count() == tenant.messages.count() == 3
        assert {tag.name for tag in thread.tags.all()} == {"new", "urgent"}

    def test_get_or_create(self) -> None:
        tag = factories.TagFactory(name="new")
        assert factories.TagFactory(tenant=tag.tenant, name="new") == tag
        assert factories.TagFactory(tenant__slug="other", name="new") != tag
        assert Tag.objects.filter(tenant=tag.tenant).count() == 1

    def test_batches_and_build(self) -> None:
        cases = factories.CaseFactory.create_batch(4)
        assert len({case.tenant_id for case in cases}) == 4
        assert set(Case.objects.filter(tenant__in=[case.tenant for case in cases])) == set(cases)
        assert factories.CaseFactory.build().pk is None


def test_sitemaps_page_by_page(desk: Desk, other: Desk) -> None:
    for day, owner in enumerate([desk, other, desk, other, desk], 1):
        owner.case(opened_at=datetime(2026, 1, day, tzinfo=UTC))
    client = Client()
    index = client.get("/sitemap.xml").content.decode()
    pages = re.findall(r"http://testserver(/sitemap-cases[^<]*)", index)
    assert len(pages) == 3
    text = "".join(client.get(page).content.decode() for page in pages)
    expected = [
        f"http://testserver{case.get_absolute_url()}"
        for owner in (desk, other)
        for case in owner.tenant.cases.all()
    ]
    assert sorted(re.findall("<loc>(.*?)</loc>", text)) == sorted(expected)
    assert sorted(re.findall("<lastmod>(.*?)</lastmod>", text)) == [
        f"2026-01-0{day}" for day in range(1, 6)
    ]
    assert f"http://testserver{desk.url()}" in client.get("/sitemap-tenants.xml").content.decode()


class TestProfile:
    def test_log_in_and_change_it(self, desk: Desk) -> None:
        client = Client()
        assert client.get("/me/").url == "/login/?next=/me/"
        answer = client.post(
            "/login/?next=/me/", {"username": "agent of Acme", "password": "secret"}
        )
        assert answer.url == "/me/"
        assert client.get("/me/").status_code == 200
        assert client.post("/me/", {"signature": "Yours, A."}).url == "/me/"
        assert "Yours, A." in client.get("/me/").content.decode()
        assert Profile.objects.get(user=desk.agent.user).signature == "Yours, A."

    def test_from_the_user(self, desk: Desk, other: Desk) -> None:
        users = [desk.agent.user, other.agent.user]
        for user in users:
            Profile.objects.create(user=user, signature=user.username)
        assert [user.profile.signature for user in users] == [user.username for user in users]
        profiles = Profile.objects.filter(user__in=users)
        assert {profile.user for profile in profiles.prefetch_related("user")} == set(users)
