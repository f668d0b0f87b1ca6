"""Generic class-based views, ModelForms and formsets."""

from __future__ import annotations

import pytest
from django.utils.html import strip_tags

from tests.helpdesk.conftest import DATABASES, Desk
from tests.helpdesk.models import Attachment, Case, Message, Profile

pytestmark = [pytest.mark.every_backend, pytest.mark.django_db(databases=DATABASES)]


def text(page: object) -> str:
    assert page.status_code == 200
    return " ".join(strip_tags(page.content.decode()).split())


def formset(*texts: str, initial: list[Message] | None = None) -> dict[str, object]:
    rows = initial or []
    data = {"messages-TOTAL_FORMS": len(rows) + len(texts), "messages-INITIAL_FORMS": len(rows)}
    for number, message in enumerate(rows):
        data |= {f"messages-{number}-id": message.pk, f"messages-{number}-text": message.text}
    for number, content in enumerate(texts, len(rows)):
        data[f"messages-{number}-text"] = content
    return data


def test_list_is_that_of_the_tenant_page_by_page(desk: Desk, neighbour: Desk) -> None:
    for number in range(12):
        case = desk.case(f"Case {number:02}", assignee=desk.agent)
    case.tags.add(desk.tag)
    neighbour.case("Secret")
    first = text(desk.client.get(desk.url()))
    assert "12 cases, page 1 of 2" in first
    assert "Case 11 agent of Acme urgent" in first
    second = text(desk.client.get(desk.url("?page=2")))
    assert "Case 01" in second and "Case 00" in second and "Case 02" not in second
    assert "Secret" not in first + second
    assert desk.client.get(desk.url("?page=3")).status_code == 404


def test_detail_with_messages_attachments_and_the_signature(desk: Desk) -> None:
    case = desk.case()
    message = Message.objects.create(tenant=desk.tenant, case=case, text="It burns")
    Attachment.objects.create(tenant=desk.tenant, message=message, name="smoke.png")
    Profile.objects.create(user=desk.agent.user, signature="Yours, A.")
    page = text(desk.client.get(case.get_absolute_url()))
    assert page.endswith("Printer on fire It burns smoke.png Yours, A.")


def test_case_of_another_tenant_is_not_found(desk: Desk, neighbour: Desk, other: Desk) -> None:
    for theirs in (neighbour.case(), other.case()):
        for rest in ("", "edit/", "delete/"):
            assert desk.client.get(desk.url(f"cases/{theirs.pk}/{rest}")).status_code == 404
        assert desk.client.post(desk.url(f"cases/{theirs.pk}/delete/")).status_code == 404


def test_create(desk: Desk, neighbour: Desk) -> None:
    form = text(desk.client.get(desk.url("cases/new/")))
    assert form.count("urgent") == 1 and "agent of Initech" not in form
    data = {"subject": "No paper", "status": "open", "priority": 2, "assignee": desk.agent.pk}
    answer = desk.client.post(desk.url("cases/new/"), {**data, "tags": [desk.tag.pk]})
    case = Case.objects.get(tenant=desk.tenant)
    assert answer.url == case.get_absolute_url()
    assert (case.subject, case.assignee, list(case.tags.all())) == (
        "No paper",
        desk.agent,
        [desk.tag],
    )


def test_tag_of_another_tenant_is_a_form_error(desk: Desk, neighbour: Desk, other: Desk) -> None:
    for tag in (neighbour.tag, other.tag):
        data = {"subject": "x", "status": "open", "priority": 0, "tags": [tag.pk]}
        page = text(desk.client.post(desk.url("cases/new/"), data))
        assert f"{tag.pk} is not one of the available choices" in page
    assert not Case.objects.filter(tenant=desk.tenant).exists()


def test_update_with_a_formset(desk: Desk) -> None:
    case = desk.case()
    message = Message.objects.create(tenant=desk.tenant, case=case, text="It burns")
    url = desk.url(f"cases/{case.pk}/edit/")
    assert "It burns" in desk.client.get(url).content.decode()
    message.text = "It smokes"
    data = {"subject": "Printer", "status": "closed", "priority": 1, "tags": [desk.tag.pk]}
    answer = desk.client.post(url, {**data, **formset("Out", initial=[message])})
    assert answer.url == case.get_absolute_url()
    case = Case.objects.get(tenant=desk.tenant, pk=case.pk)
    assert (case.subject, case.status, case.tags.get()) == ("Printer", "closed", desk.tag)
    assert [m.text for m in case.messages.order_by("sent_at")] == ["It smokes", "Out"]
    assert {m.tenant_id for m in case.messages.all()} == {desk.tenant.pk}


def test_formset_refuses_a_message_of_another_case(desk: Desk, neighbour: Desk) -> None:
    case, theirs = desk.case(), neighbour.case()
    message = Message.objects.create(tenant=neighbour.tenant, case=theirs, text="Theirs")
    data = {"subject": "x", "status": "open", "priority": 0}
    page = desk.client.post(
        desk.url(f"cases/{case.pk}/edit/"), {**data, **formset(initial=[message])}
    )
    assert "Select a valid choice" in text(page)
    assert theirs.messages.get().text == "Theirs"


def test_delete_takes_the_messages_along(desk: Desk) -> None:
    case, stays = desk.case(), desk.case("Stays")
    for of in (case, stays):
        Message.objects.create(tenant=desk.tenant, case=of, text="x")
    case.tags.add(desk.tag)
    url = desk.url(f"cases/{case.pk}/delete/")
    assert "Delete Printer on fire?" in text(desk.client.get(url))
    assert desk.client.post(url).url == desk.url()
    assert Case.objects.get(tenant=desk.tenant) == stays
    assert Message.objects.get(tenant=desk.tenant).case == stays
