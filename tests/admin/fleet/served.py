"""The site in a process of its own, asked in lines of JSON: a request, or code to run in it."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from contextlib import ExitStack, suppress
from typing import Any


def main() -> None:
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.admin.fleet.settings"
    import django

    django.setup()
    from django.contrib.auth.models import User
    from django.core.management import CommandError, call_command

    sys.stdout, answers = sys.stderr, sys.stdout
    for alias in ("default", "directory"):
        call_command("migrate", database=alias, verbosity=0)
    if not User.objects.exists():
        User.objects.create_superuser("boss")
        # The fleet was made without the apps of the admin.
        with suppress(CommandError):  # Those that do not exist are none of its business.
            call_command("migrate_shards", verbosity=0)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            told = _run(asked["code"]) if "code" in asked else _answer(asked)
        except Exception:
            told = {"error": traceback.format_exc()}
        print(json.dumps(told), file=answers, flush=True)


def _run(code: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    exec(code, found)
    return {"result": found.get("result")}


def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    from django.contrib.auth.models import User
    from django.db import connections
    from django.test import Client
    from django.test.utils import CaptureQueriesContext

    client = Client(enforce_csrf_checks=asked.get("csrf", False))
    if asked["user"]:
        client.force_login(User.objects.get(username=asked["user"]))
    with ExitStack() as stack:
        captured = {
            alias: stack.enter_context(CaptureQueriesContext(connections[alias]))
            for alias in ("default", "directory")
        }
        began, busy = time.perf_counter(), time.process_time()
        if asked["data"] is None:
            response = client.get(asked["path"])
        else:
            response = client.post(asked["path"], asked["data"])
        seconds, busy = time.perf_counter() - began, time.process_time() - busy
    messages = [str(one) for one in response.wsgi_request._messages._queued_messages]
    return {
        "status": response.status_code,
        "body": response.content.decode(),
        "location": response.headers.get("Location", ""),
        "messages": messages,
        "seconds": seconds,
        "busy": busy,
        "queries": {alias: [q["sql"] for q in those] for alias, those in captured.items()},
    }


if __name__ == "__main__":
    main()
