"""django-import-export: a resource, and its pages in the admin."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client
from django.urls import reverse
from django.utils.html import strip_tags
from import_export.exceptions import ImportError
from tablib import Dataset

from sharded_orm import runtime
from sharded_orm.exceptions import ScatterError
from tests.helpdesk.conftest import DATABASES, Desk
from tests.helpdesk.models import Case
from tests.helpdesk.resources import CaseResource

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]
HEADERS = ["id", "tenant", "subject", "status", "tags"]


def cases(desk: Desk) -> list[tuple[str, list[str]]]:
    rows = Case.objects.filter(tenant=desk.tenant).order_by("subject").prefetch_related("tags")
    return [(case.subject, [tag.name for tag in case.tags.all()]) for case in rows]


def test_export_of_one_tenant_and_of_all(desk: Desk, neighbour: Desk, other: Desk) -> None:
    desk.case("A").tags.add(desk.tag)
    neighbour.case("B")
    other.case("C")
    one = CaseResource().export(Case.objects.filter(tenant=desk.tenant))
    assert (one.headers, one["subject"], one["tags"]) == (HEADERS, ["A"], ["urgent"])
    everything = CaseResource().export(Case.objects.scatter().prefetch_related("tags"))
    assert sorted(everything["tenant"]) == ["acme", "globex", "initech"]


def test_import_into_several_shards(desk: Desk, neighbour: Desk, other: Desk) -> None:
    case = desk.case("Old")
    table = Dataset(
        [case.pk, "acme", "Changed", "closed", "urgent"],
        ["", "acme", "New", "open", ""],
        ["", "globex", "There", "open", "urgent"],
        headers=HEADERS,
    )
    result = CaseResource().import_data(table, raise_errors=True)
    assert result.totals == {
        **dict.fromkeys(result.totals, 0),
        "new": 2,
        "update": 1,
    }
    assert cases(desk) == [("Changed", ["urgent"]), ("New", [])]
    assert cases(other) == [("There", ["urgent"])]
    there = Case.objects.get(tenant=other.tenant)
    assert there.tags.get() == other.tag


def test_id_of_another_tenant_is_not_overwritten(desk: Desk, neighbour: Desk) -> None:
    theirs = neighbour.case("Theirs")
    table = Dataset([theirs.pk, "acme", "Stolen", "open", ""], headers=HEADERS)
    result = CaseResource().import_data(table)
    # Both tenants are on one shard, where the id is taken.
    assert result.has_errors() or result.has_validation_errors()
    assert (cases(desk), cases(neighbour)) == ([], [("Theirs", [])])


@pytest.mark.parametrize("dry_run", [True, False])
def test_an_error_and_a_dry_run_leave_no_row_on_any_shard(
    desk: Desk, other: Desk, dry_run: bool
) -> None:
    rows = [["", "acme", "New", "open", ""], ["", "globex", "There", "open", ""]]
    if not dry_run:
        rows.append(["", "nobody", "x", "open", ""])
    result = CaseResource().import_data(Dataset(*rows, headers=HEADERS), dry_run=dry_run)
    assert result.has_errors() is not dry_run
    assert (cases(desk), cases(other)) == ([], [])


def test_bulk(desk: Desk, other: Desk) -> None:
    class Bulk(CaseResource):
        class Meta(CaseResource.Meta):
            fields = ["id", "tenant", "subject"]
            use_bulk = True

    case = desk.case("Old")
    table = Dataset(
        [case.pk, "acme", "Changed"],
        ["", "globex", "There"],
        headers=["id", "tenant", "subject"],
    )
    Bulk().import_data(table, raise_errors=True)
    assert (cases(desk), cases(other)) == ([("Changed", [])], [("There", [])])


def test_rows_are_deleted(desk: Desk, other: Desk) -> None:
    class Deleting(CaseResource):
        def for_delete(self, row: Any, instance: Any) -> bool:
            return row["subject"] == "delete"

    class DeletingInBulk(Deleting):
        class Meta(CaseResource.Meta):
            use_bulk = True

    rows = [[owner.case().pk, owner.tenant.slug, "delete", "", ""] for owner in (desk, other)]
    table = Dataset(*rows, headers=HEADERS)
    # It deletes by primary keys only.
    with pytest.raises(ImportError, match="sharded by 'tenant'"):
        DeletingInBulk().import_data(table, raise_errors=True)
    assert len(cases(desk)) == len(cases(other)) == 1
    Deleting().import_data(table, raise_errors=True)
    assert cases(desk) == cases(other) == []


def test_without_the_key_rows_are_refused(desk: Desk) -> None:
    class NoKey(CaseResource):
        class Meta(CaseResource.Meta):
            import_id_fields = ["id"]

    case = desk.case("Old")
    table = Dataset([case.pk, "acme", "Changed", "open", ""], headers=HEADERS)
    result = NoKey().import_data(table)
    ((_, (error,)),) = result.row_errors()
    assert "Case is sharded by 'tenant'" in str(error.error)
    assert cases(desk) == [("Old", [])]


def test_pages_of_the_admin(desk: Desk, other: Desk) -> None:
    client = Client()
    client.force_login(User.objects.create_superuser("boss"))
    desk.case("Old")
    other.case("There")
    formats = {"format": "0", "resource": ""}  # CSV
    url = reverse("admin:helpdesk_case_export")
    fields: Any = {f"caseresource_{name}": "on" for name in HEADERS}
    assert client.get(url).status_code == 200
    exported = client.post(url, {**formats, **fields})
    table = Dataset().load(exported.content.decode(), "csv")
    assert sorted(table["subject"]) == ["Old", "There"]
    one = client.post(f"{url}?_key={desk.tenant.pk}", {**formats, **fields})
    assert Dataset().load(one.content.decode(), "csv")["subject"] == ["Old"]


def test_import_page_of_the_admin(desk: Desk, other: Desk) -> None:
    client = Client()
    client.force_login(User.objects.create_superuser("boss"))
    case = desk.case("Old")
    rows = [[case.pk, "acme", "Changed", "open", ""], ["", "globex", "There", "open", "urgent"]]
    table = Dataset(*rows, headers=HEADERS).export("csv")
    url = reverse("admin:helpdesk_case_import")
    assert client.get(url).status_code == 200
    upload = SimpleUploadedFile("cases.csv", table.encode())
    preview = client.post(url, {"format": "0", "resource": "", "import_file": upload})
    totals = preview.context["result"].totals
    assert (totals["new"], totals["update"], totals["error"]) == (1, 1, 0)
    assert (cases(desk), cases(other)) == ([("Old", [])], [])
    confirmed = preview.context["confirm_form"].initial
    done = client.post(reverse("admin:helpdesk_case_process_import"), confirmed)
    assert done.status_code == 302
    assert (cases(desk), cases(other)) == ([("Changed", [])], [("There", ["urgent"])])


@pytest.mark.mysql_settings
@pytest.mark.django_db(databases=DATABASES, transaction=True)
def test_export_of_all_shards_fails_if_one_does_not_answer(desk: Desk, other: Desk) -> None:
    desk.case("Here")
    other.case("There")
    client = Client()
    client.force_login(User.objects.create_superuser("boss"))
    before = runtime.topology()
    node = before.resolve("helpdesk_00040").node
    closed_port = {**before.nodes[node], "PORT": 1}
    runtime.swap(replace(before, nodes={**before.nodes, node: closed_port}))
    try:
        # The list names the node; an export cannot.
        page = client.get(reverse("admin:helpdesk_case_changelist")).content.decode()
        assert "Here" in page and f"on {node}: " in strip_tags(page)
        data = {"format": "0", "resource": "", "caseresource_subject": "on"}
        with pytest.raises(ScatterError, match="32 of 64 shards"):
            client.post(reverse("admin:helpdesk_case_export"), data)
    finally:
        runtime.swap(before)
