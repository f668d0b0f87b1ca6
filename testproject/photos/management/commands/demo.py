"""``manage.py demo``: creates, fills and serves the photo site."""

from __future__ import annotations

import os
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib.staticfiles.management.commands.runserver import Command as RunServer
from django.core.management import BaseCommand, CommandError, call_command

from testproject.photos import next_release
from testproject.photos.browser import CheckFailed, browse, serving
from testproject.photos.installation import ADMIN, admin_password, prepare

# The commands of a rolling upgrade, step by step.
_UPGRADE = (
    "migrate_shards --rolling --plan",
    "migrate_shards --rolling --until migrate-passive",
    "migrate_shards --rolling --until switch",
    "migrate_shards --rolling",
    "shards status",
    "runserver 8001 --noreload     # the next release, beside this one",
    "shards balance --pairs",
)


class Command(BaseCommand):
    help = (
        "Creates the databases, makes sample content and an admin login, and serves the site until"
        " it is interrupted. May be run again: what is there is kept."
    )
    # Since Django 6.1, the checks of fields connect to the databases, which may not exist yet.
    requires_system_checks = ()

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--host", default="127.0.0.1", help="Default: %(default)s")
        parser.add_argument(
            "--port", type=int, help="Default: 8000; with --check one that is free."
        )
        parser.add_argument(
            "--check",
            action="store_true",
            help="Fetch the pages over HTTP instead of staying up; status 1 if one is wrong.",
        )

    def handle(self, **options: Any) -> None:
        host, port = options["host"], options["port"]
        if not {host, f"[{host}]"} & set(settings.ALLOWED_HOSTS):
            # Visitors may use any host name for other addresses; and pages with DEBUG are for this
            # machine only.
            settings.ALLOWED_HOSTS = [*settings.ALLOWED_HOSTS, "*"]
            settings.DEBUG = False
        began = time.monotonic()
        for step in prepare():
            self._say(began, step)
        password = admin_password()
        release = None
        if os.environ.get("SHARDED_ORM_DEMO_PAIR"):
            release = next_release.write(Path(os.environ["SHARDED_ORM_DEMO_DIR"], "next_release"))
            self._say(began, f"the next release of the site is in {release.parent}")
        if options["check"]:
            self._check(began, host, port or 0, password)
        else:
            # This server serves the style sheets itself, also without DEBUG.
            call_command(
                _Server(password, release, stdout=self.stdout),
                f"[{host}]:{port or 8000}" if ":" in host else f"{host}:{port or 8000}",
                use_ipv6=":" in host,
                use_reloader=False,
                insecure_serving=True,
            )

    def _check(self, began: float, host: str, port: int, password: str) -> None:
        try:
            with serving(host, port) as address:
                self._say(began, f"the server is up: {address}, admin login {ADMIN} / {password}")
                for step in browse(address, password):
                    self._say(began, step)
        except (CheckFailed, OSError) as exc:
            raise CommandError(str(exc)) from exc
        self.stdout.write(self.style.SUCCESS("The demo works."))

    def _say(self, began: float, step: str) -> None:
        self.stdout.write(f"{time.monotonic() - began:6.1f} s  {step}")
        self.stdout.flush()


class _Server(RunServer):
    """Django's server, which prints its address once it listens."""

    def __init__(self, password: str, release: Path | None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._password = password
        self._release = release

    def on_bind(self, server_port: int) -> None:
        host = f"[{self.addr}]" if ":" in self.addr else self.addr
        self.stdout.write(
            f"\nThe photo site:  http://{host}:{server_port}/\n"
            f"The admin:       http://{host}:{server_port}/admin/\n"
            f"Login for both:  {ADMIN} / {self._password}\n\n"
            "Stop it with Control-C.\n"
        )
        if self._release is not None:
            self.stdout.write(
                "\nThe shards are on a pair of servers, and half of them are active on each. In another"
                " terminal, give them the schema of the\nnext release while this one serves, and watch"
                ' "Shards" in the admin:\n'
                + "".join(f"    {self._release} {command}\n" for command in _UPGRADE)
            )
        self.stdout.flush()
