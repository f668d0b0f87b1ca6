"""Forms and the admin of objects."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest
from django import forms
from django.contrib.auth.models import User as Visitor
from django.test import Client
from django.urls import reverse

from sharded_orm.contrib.objects.admin import ObjectAdmin
from sharded_orm.contrib.objects.exceptions import ConcurrentEdit, InvalidObjectType
from sharded_orm.contrib.objects.forms import ObjectForm
from tests.integration.objects.conftest import DATABASES, on
from tests.integration.objects.site import site
from tests.pinboards.models import Board, Everything, Pin

pytestmark = [
    pytest.mark.django_db(databases=DATABASES),
    pytest.mark.urls("tests.integration.objects.site"),
]


class PinForm(ObjectForm):
    class Meta:
        model = Pin
        fields = ("board", "note", "link")


class EverythingForm(ObjectForm):
    class Meta:
        model = Everything
        fields = "__all__"


def data_of(form: Any) -> dict[str, Any]:
    """What a browser sends of a form that nobody has touched."""
    return {field.html_name: field.value() for field in form if field.value() not in (None, False)}


def test_a_form_creates_and_changes_an_object() -> None:
    board = on(Board, 2, name="b")
    form = PinForm({"board": board.pk, "note": "n", "link": "https://example.org/"})
    assert form.is_valid(), form.errors
    pin = form.save()
    shown = PinForm(instance=Pin.objects.get(pin.pk))
    assert shown["board"].value() == board.pk
    sent = PinForm(data_of(shown) | {"note": "changed"}, instance=Pin.objects.get(pin.pk))
    assert sent.is_valid(), sent.errors
    assert sent.changed_data == ["note"]
    assert sent.save().version == 2
    assert Pin.objects.get(pin.pk).note == "changed"


def test_a_form_has_all_fields_of_the_body_and_none_of_the_table() -> None:
    names = set(EverythingForm().fields)
    assert names == {f.name for f in Everything.body_fields() if f.editable} | {"object_version"}


@pytest.mark.parametrize("board", ["", "x", "7", "another type", "deleted"])
def test_a_form_refuses_references_to_nothing(board: str) -> None:
    gone = on(Board, 2, name="gone")
    ids = {"another type": on(Pin, 2, board=gone).pk, "deleted": gone.pk}
    gone.delete()
    form = PinForm({"board": ids.get(board, board), "note": "n", "link": "https://example.org/"})
    assert set(form.errors) == {"board"}


def test_a_form_does_not_overwrite_what_its_visitor_has_not_seen() -> None:
    pin = on(Pin, 1, board=on(Board, 2, name="b"), note="a", link="https://example.org/")
    sent = data_of(PinForm(instance=pin))
    with pin.edit():
        pin.note = "of somebody else"
    late = PinForm(sent, instance=Pin.objects.get(pin.pk))
    assert late.errors.as_data()["__all__"][0].code == "concurrent_edit"
    without = {name: value for name, value in sent.items() if name != "object_version"}
    assert not PinForm(without, instance=Pin.objects.get(pin.pk)).is_valid()
    form = PinForm(data_of(PinForm(instance=pin)), instance=Pin.objects.get(pin.pk))
    assert form.is_valid()
    with pin.edit():
        pin.note = "again"
    with pytest.raises(ConcurrentEdit):
        form.save()


def test_the_admin_lists_changes_and_deletes(admin_user: Visitor, client: Client) -> None:
    client.force_login(admin_user)
    board = on(Board, 2, name="b")
    pins = [on(Pin, n, board=board, note=f"note {n}", link="https://example.org/") for n in (1, 6)]
    rows = client.get(reverse("pinboards:pinboards_pin_changelist"))
    assert rows.status_code == 200
    text = rows.content.decode()
    links = re.findall(r'href="([^"]*/change/[^"]*)"', text)
    assert "note 1" in text and "note 6" in text and len(links) == 2
    (link,) = (html.unescape(each) for each in links if str(pins[0].pk) in each)
    page = client.get(link)
    sent = data_of(page.context["adminform"].form)
    assert client.post(link, sent | {"note": "by admin"}).status_code == 302
    assert Pin.objects.get(pins[0].pk).note == "by admin"
    late = client.post(link, sent | {"note": "late"})
    assert "Somebody else has changed" in late.content.decode()
    answer = client.post(link.replace("/change/", "/delete/"), {"post": "yes"})
    assert answer.status_code == 302
    assert Pin.objects.get_many(pin.pk for pin in pins).keys() == {pins[1].pk}
    assert Pin.objects.with_deleted().get(pk=pins[0].pk).note == "by admin"


def test_an_admin_that_names_its_fields_compares_versions(
    admin_user: Visitor, client: Client
) -> None:
    client.force_login(admin_user)
    pin = on(Pin, 1, board=on(Board, 2, name="b"), note="a", link="https://example.org/")
    rows = client.get(reverse("short:pinboards_pin_changelist")).content.decode()
    (link,) = (html.unescape(each) for each in re.findall(r'href="([^"]*/change/[^"]*)"', rows))
    page = client.get(link)
    seen = re.search(r'name="object_version" value="(\d+)"', page.content.decode())
    assert seen is not None
    sent = {"note": "by admin", "link": "https://example.org/", "object_version": seen[1]}
    assert client.post(link, sent).status_code == 302
    assert Pin.objects.get(pin.pk).note == "by admin"
    assert "Somebody else has changed" in client.post(link, sent).content.decode()


@pytest.mark.parametrize(
    "attrs",
    [
        {"list_display": ("id", "active"), "list_editable": ("active",)},
        {"form": type("PlainForm", (forms.ModelForm,), {})},
    ],
)
def test_an_admin_without_versions_is_refused(attrs: dict[str, Any]) -> None:
    with pytest.raises(InvalidObjectType, match="version"):
        type("WrongAdmin", (ObjectAdmin,), attrs)(Pin, site)
