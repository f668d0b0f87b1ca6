"""The check of commands that other apps hide."""

from __future__ import annotations

from django.test import override_settings

from sharded_orm.checks.commands import check_commands

OF_DJANGO = ["django.contrib.contenttypes", "django.contrib.auth", "django.contrib.staticfiles"]


def hidden() -> dict[str, str]:
    """Return the hint of each warning, by its message."""
    messages = check_commands()
    assert {message.id for message in messages} <= {"sharded_orm.W023"}
    return {message.msg: str(message.hint) for message in messages}


@override_settings(INSTALLED_APPS=["sharded_orm", *OF_DJANGO])
def test_the_library_before_the_apps_of_django_is_silent() -> None:
    assert hidden() == {}


@override_settings(INSTALLED_APPS=[*OF_DJANGO, "sharded_orm"])
def test_each_hidden_command_is_named_with_its_app() -> None:
    warnings = hidden()
    expected = {
        "changepassword": "django.contrib.auth",
        "createsuperuser": "django.contrib.auth",
        "remove_stale_contenttypes": "django.contrib.contenttypes",
    }
    assert [f"'manage.py {name}' is the command of {app!r}" for name, app in expected.items()] == [
        message.split(",")[0] for message in warnings
    ]
    for app, hint in zip(expected.values(), warnings.values(), strict=True):
        assert hint.startswith(f"List 'sharded_orm' before {app!r} in INSTALLED_APPS")


@override_settings(INSTALLED_APPS=["django.contrib.staticfiles", "sharded_orm", "tests.photos"])
def test_only_apps_with_a_command_of_ours_have_to_come_later() -> None:
    assert hidden() == {}


@override_settings(INSTALLED_APPS=["tests.unit.checks.own_commands", "sharded_orm"])
def test_a_command_that_derives_from_ours_may_come_first() -> None:
    """Its ``flush`` derives from that of the library, its ``dbshell`` from that of Django."""
    (message,) = hidden()
    assert message.startswith(
        "'manage.py dbshell' is the command of 'tests.unit.checks.own_commands'"
    )
