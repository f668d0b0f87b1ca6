"""Forms and the admin of objects."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django import forms
from django.contrib import admin
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.auth.models import Permission
from django.contrib.auth.models import User as Visitor
from django.db import connections
from django.db.models.signals import ModelSignal, pre_save
from django.test import Client
from django.urls import reverse

from sharded_orm.contrib.objects.admin import ObjectAdmin
from sharded_orm.contrib.objects.exceptions import ConcurrentEdit, InvalidObjectType
from sharded_orm.contrib.objects.forms import ObjectForm
from tests.integration.objects.conftest import DATABASES, on, set_body
from tests.integration.objects.site import site
from tests.pinboards.models import Board, BoardPins, Everything, FacebookUsers, Pin, User

pytestmark = [
    pytest.mark.django_db(databases=[*DATABASES, "events"]),
    pytest.mark.urls("tests.integration.objects.site"),
]


@contextmanager
def connected(signal: ModelSignal, receiver: Any, sender: Any) -> Iterator[None]:
    signal.connect(receiver, sender=sender)
    try:
        yield
    finally:
        signal.disconnect(receiver, sender=sender)


class PinForm(ObjectForm):
    class Meta:
        model = Pin
        fields = ("board", "note", "link")


class EntryForm(forms.ModelForm):
    class Meta:
        model = BoardPins
        fields = ("source_id", "target_id", "sequence")


class FacebookUserForm(forms.ModelForm):
    class Meta:
        model = FacebookUsers
        fields = ("value", "target_id")


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
    if board not in ("", "x"):
        assert form.errors["board"] == [f"There is no board with the id {ids.get(board, board)}."]


@pytest.mark.parametrize(
    ("source", "target", "field"), [("pin", "pin", "source_id"), ("board", "board", "target_id")]
)
def test_a_form_of_a_mapping_refuses_ids_of_other_types(
    source: str, target: str, field: str
) -> None:
    board = on(Board, 2, name="b")
    ids = {"board": board.pk, "pin": on(Pin, 3, board=board).pk}
    form = EntryForm({"source_id": ids[source], "target_id": ids[target], "sequence": 1})
    assert set(form.errors) == {field}
    model = {"source_id": "board", "target_id": "pin"}[field]
    assert form.errors[field] == [f"{form.data[field]} is not the id of a {model}."]


@pytest.mark.parametrize("field", ["source_id", "target_id"])
def test_a_form_of_a_mapping_refuses_ids_of_shards_that_do_not_exist(field: str) -> None:
    board = on(Board, 2, name="b")
    sent = {"source_id": board.pk, "target_id": on(Pin, 3, board=board).pk, "sequence": 1}
    sent[field] += 4000 << 46
    form = EntryForm(sent)
    model = {"source_id": "board", "target_id": "pin"}[field]
    assert form.errors == {field: [f"{sent[field]} is not the id of a {model}."]}


def test_a_form_of_a_lookup_refuses_ids_of_other_types() -> None:
    board = on(Board, 2, name="b")
    form = FacebookUserForm({"value": "4711", "target_id": board.pk})
    assert form.errors == {"target_id": [f"{board.pk} is not the id of a user."]}
    assert FacebookUserForm({"value": "4711", "target_id": on(User, 2, name="u").pk}).is_valid()


def test_a_form_of_a_mapping_changes_the_position_only() -> None:
    board = on(Board, 2, name="b")
    pins = [on(Pin, 3, board=board), on(Pin, 3, board=board)]
    form = EntryForm({"source_id": board.pk, "target_id": pins[0].pk, "sequence": 1})
    assert form.is_valid(), form.errors
    entry = form.save()
    sent = {"source_id": board.pk, "target_id": pins[0].pk, "sequence": 2}
    form = EntryForm(sent, instance=BoardPins.objects.get(source_id=board.pk, pk=entry.pk))
    assert form.is_valid(), form.errors
    assert form.save().sequence == 2
    form = EntryForm(sent | {"target_id": pins[1].pk}, instance=form.instance)
    assert "never change" in form.errors["__all__"][0]


def test_a_form_of_a_mapping_refuses_a_pair_that_is_there() -> None:
    board = on(Board, 2, name="b")
    pin = on(Pin, 3, board=board)
    BoardPins.objects.add(board, pin)
    form = EntryForm({"source_id": board.pk, "target_id": pin.pk, "sequence": 1})
    assert "is there already" in form.errors["__all__"][0]


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
    # The columns of the table, the first and the fourth, can be sorted by.
    assert set(re.findall(r"\?o=([-.0-9]+)", text)) == {"1", "4"}
    for order in ("2", "-3"):
        listed = client.get(reverse("pinboards:pinboards_pin_changelist"), {"o": order})
        assert listed.status_code == 200
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


def change_link(client: Client, admin: str) -> str:
    """Return the address of the change page of the one pin that an admin site lists."""
    rows = client.get(reverse(f"{admin}:pinboards_pin_changelist")).content.decode()
    (link,) = re.findall(r'href="([^"]*/change/[^"]*)"', rows)
    return html.unescape(link)


def test_an_admin_that_names_its_fields_compares_versions(
    admin_user: Visitor, client: Client
) -> None:
    client.force_login(admin_user)
    pin = on(Pin, 1, board=on(Board, 2, name="b"), note="a", link="https://example.org/")
    link = change_link(client, "short")
    page = client.get(link)
    seen = re.search(r'name="object_version" value="(\d+)"', page.content.decode())
    assert seen is not None
    sent = {"note": "by admin", "link": "https://example.org/", "object_version": seen[1]}
    assert client.post(link, sent).status_code == 302
    assert Pin.objects.get(pin.pk).note == "by admin"
    assert "Somebody else has changed" in client.post(link, sent).content.decode()


def test_a_change_between_the_check_of_a_form_and_its_save(
    admin_user: Visitor, client: Client
) -> None:
    client.force_login(admin_user)
    pin = on(Pin, 1, board=on(Board, 2, name="b"), note="a", link="https://example.org/")
    link = change_link(client, "pinboards")
    sent = data_of(client.get(link).context["adminform"].form)

    def change(instance: Any, using: str, **kwargs: Any) -> None:
        with connections[using].cursor() as cursor:
            cursor.execute("UPDATE pinboards_pin SET version = version + 1")

    with connected(pre_save, change, sender=Pin):
        answer = client.post(link, sent | {"note": "by admin"}, follow=True)
    assert "at the same time. Nothing was saved." in answer.content.decode()
    assert answer.redirect_chain == [(link, 302)]
    assert Pin.objects.get(pin.pk).note == "a"
    assert not LogEntry.objects.exists()
    assert client.post(link, sent | {"note": "by admin"}).status_code == 302
    assert Pin.objects.get(pin.pk).note == "by admin"


@pytest.mark.parametrize(
    ("tags", "error"), [('["%s"]' % ("x" * 5000), "5000 bytes"), ('["\\\\u0000"]', "NUL")]
)
def test_a_body_that_cannot_be_stored_is_an_error_of_the_form(
    tags: str, error: str, admin_user: Visitor, client: Client
) -> None:
    client.force_login(admin_user)
    row = on(Everything, 1)
    data = {"number": 1, "tags": tags.replace("\\\\", "\\"), "text": "t", "title": "t"}
    form = EverythingForm(data | {"object_version": row.version}, instance=row)
    assert error in str(form.errors["__all__"])
    rows = client.get(reverse("pinboards:pinboards_everything_changelist")).content.decode()
    (link,) = (html.unescape(each) for each in re.findall(r'href="([^"]*/change/[^"]*)"', rows))
    sent = data_of(client.get(link).context["adminform"].form) | data
    answer = client.post(link, sent)
    assert answer.status_code == 200 and error in answer.content.decode()
    assert Everything.objects.get(row.pk).version == 1


def test_the_admin_lists_and_restores_deleted_objects(admin_user: Visitor, client: Client) -> None:
    board = on(Board, 2, name="b")
    pins = [on(Pin, n, board=board, note=f"note {n}") for n in (1, 3, 6)]
    for pin in pins[1:]:
        pin.delete()
    listed, deleted = reverse("pinboards:pinboards_pin_changelist"), {"deleted": "yes"}
    where = f"{listed}?deleted=yes"
    viewer = Visitor.objects.create_user("viewer", is_staff=True)
    viewer.user_permissions.add(
        Permission.objects.get(codename="view_pin", content_type__app_label="pinboards")
    )
    client.force_login(viewer)
    shown = client.get(listed, deleted).content.decode()
    assert "note 3" in shown and "Restore" not in shown
    client.force_login(admin_user)
    now = client.get(listed).content.decode()
    assert "note 1" in now and "note 3" not in now and "Restore" not in now
    page = client.get(listed, deleted)
    text = page.content.decode()
    assert "note 1" not in text and "note 3" in text and "note 6" in text
    assert "Restore selected pins" in text and "Delete selected" not in text
    assert "/change/" not in text.partition('id="result_list"')[2].partition("</table>")[0]
    (box,) = [
        value
        for value in re.findall(r'name="_selected_action" value="([^"]+)"', text)
        if str(pins[1].pk) in value
    ]
    sent = {"action": "restore", "_selected_action": html.unescape(box)}
    client.force_login(viewer)
    client.post(where, sent)
    assert not Pin.objects.get_many([pins[1].pk])
    client.force_login(admin_user)
    assert client.post(where, sent).status_code == 302
    assert Pin.objects.get(pins[1].pk).note == "note 3"
    assert not Pin.objects.get_many([pins[2].pk])
    (entry,) = LogEntry.objects.filter(object_id__contains=str(pins[1].pk))
    assert (entry.user, entry.action_flag, "Restored" in entry.get_change_message()) == (
        admin_user, CHANGE, True
    )  # fmt: skip


def test_the_admin_restores_the_others_of_a_damaged_and_a_purged_object(
    admin_user: Visitor, client: Client
) -> None:
    client.force_login(admin_user)
    board = on(Board, 2, name="b")
    pins = [on(Pin, n, board=board, note=f"note {n}") for n in (1, 3, 6)]
    for pin in pins:
        pin.delete()
    set_body(pins[0], "[1]")
    where = f"{reverse('pinboards:pinboards_pin_changelist')}?deleted=yes"
    text = client.get(where).content.decode()
    boxes = re.findall(r'name="_selected_action" value="([^"]+)"', text)
    sent = {"action": "restore", "_selected_action": [html.unescape(box) for box in boxes]}

    def purge(instance: Any, **kwargs: Any) -> None:
        if Pin.objects.with_deleted().filter(pk=pins[2].pk).exists():
            pins[2].purge()

    with connected(pre_save, purge, sender=Pin):
        answer = client.post(where, sent, follow=True)
    assert answer.status_code == 200
    assert Pin.objects.get_many(pin.pk for pin in pins[:2]).keys() == {pins[1].pk}
    messages = [str(message) for message in answer.context["messages"]]
    assert any(f"Pin(pk={pins[0].pk}) on" in message for message in messages)
    assert LogEntry.objects.count() == 1


@pytest.mark.parametrize("body", ["[1]", '{"board": "x", "note": "n", "link": null}'])
@pytest.mark.parametrize("where", [{}, {"_shard": "pins_00001"}], ids=["all shards", "one shard"])
def test_the_admin_lists_damaged_objects_with_their_errors(
    body: str, where: dict[str, str], admin_user: Visitor, client: Client
) -> None:
    client.force_login(admin_user)
    board = on(Board, 2, name="b")
    pins = [on(Pin, 1, board=board, note=f"note {n}") for n in (1, 2)]
    set_body(pins[0], body)
    listed = reverse("pinboards:pinboards_pin_changelist")
    page = client.get(listed, where)
    text = html.unescape(page.content.decode())
    table = text.partition('id="result_list"')[2].partition("</table>")[0]
    assert page.status_code == 200
    assert f"Pin(pk={pins[0].pk}) on 'pins_00001'" in text.partition('id="result_list"')[0]
    assert "note 2" in table and table.count("damaged") == (2 if body == "[1]" else 1)
    links = [html.unescape(each) for each in re.findall(r'href="([^"]*/change/[^"]*)"', table)]
    assert len(links) == 2
    (link,) = (each for each in links if str(pins[0].pk) in each)
    for answer in (client.get(link, follow=True), client.post(link, {"note": "n"}, follow=True)):
        (message,) = answer.context["messages"]
        assert answer.redirect_chain[-1][0] == listed and str(pins[0].pk) in str(message)
    client.post(link.replace("/change/", "/delete/"), {"post": "yes"})
    assert "damaged" not in client.get(listed).content.decode()
    deleted = client.get(listed, {"deleted": "yes"}).content.decode()
    assert str(pins[0].pk) in deleted and "damaged" in deleted


def test_the_admin_lists_columns_of_any_kind_beside_damaged_objects(
    admin_user: Visitor, client: Client
) -> None:
    client.force_login(admin_user)
    boards = [on(Board, n, name="b") for n in (2, 3)]
    pins = [on(Pin, 1, board=boards[n], note=f"note {n}") for n in (0, 1, 1)]
    set_body(boards[0], "[1]")
    set_body(pins[2], "[1]")
    page = client.get(reverse("short:pinboards_pin_changelist"))
    before, _, table = page.content.decode().partition('id="result_list"')
    # The error of the object to which a column refers, and that of an object of the list.
    assert all(f"(pk={row.pk}) on" in before for row in (boards[0], pins[2]))
    assert "NOTE 0" in table and "NOTE 1" in table and f"board {boards[1].pk}" in table
    assert table.count("damaged") == 4 and table.count("icon-no") == 2
    assert ">pins_00001</a>" in table and len(re.findall(r'href="[^"]*/change/', table)) == 3
    # The column of the table, the first one, can be sorted by as usual.
    assert set(re.findall(r"\?o=([-.0-9]+)", table)) == {"1"}


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


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("search_fields", ["=id", "^note"]),
        ("search_fields", ["note__icontains"]),
        ("list_filter", ["note"]),
        ("list_filter", [("note", admin.AllValuesFieldListFilter)]),
        ("ordering", ["-note"]),
        ("date_hierarchy", "note"),
    ],
)
def test_an_admin_whose_list_would_search_bodies_is_refused(option: str, value: Any) -> None:
    with pytest.raises(InvalidObjectType, match=rf"{option} names \['note'\]"):
        type("WrongAdmin", (ObjectAdmin,), {option: value})(Pin, site)


def test_options_of_an_admin_that_are_none_are_left_to_the_checks_of_django() -> None:
    attrs = {"search_fields": None, "list_filter": None}
    wrong = type("WrongAdmin", (ObjectAdmin,), attrs)(Pin, site)
    assert {message.id for message in wrong.check()} == {"admin.E112", "admin.E126"}


def test_an_object_may_refer_to_a_damaged_one() -> None:
    board = on(Board, 2, name="b")
    pin = on(Pin, 1, board=board, note="a", link="https://example.org/")
    set_body(board, "[1]")
    shown = data_of(PinForm(instance=Pin.objects.get(pin.pk)))
    form = PinForm(shown | {"note": "b"}, instance=Pin.objects.get(pin.pk))
    assert form.is_valid(), form.errors
    assert form.save().note == "b"
