"""Serve the site in a process of its own. Each line of input is JSON: a request, or code to run."""

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
        # The fleet was migrated without the apps of the admin.
        with suppress(CommandError):  # Without shards that a test has removed.
            call_command("migrate_shards", verbosity=0)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = _run(request["code"]) if "code" in request else _answer(request)
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


def _run(code: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    return {"result": namespace.get("result")}


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    from django.contrib.auth.models import User
    from django.db import connections
    from django.test import Client
    from django.test.utils import CaptureQueriesContext

    client = Client(enforce_csrf_checks=request.get("csrf", False))
    if request["user"]:
        client.force_login(User.objects.get(username=request["user"]))
    with ExitStack() as stack:
        captured = {
            alias: stack.enter_context(CaptureQueriesContext(connections[alias]))
            for alias in ("default", "directory")
        }
        began, busy = time.perf_counter(), time.process_time()
        if request["data"] is None:
            response = client.get(request["path"])
        else:
            response = client.post(request["path"], request["data"])
        seconds, busy = time.perf_counter() - began, time.process_time() - busy
    messages = [str(message) for message in response.wsgi_request._messages._queued_messages]
    return {
        "status": response.status_code,
        "body": response.content.decode(),
        "location": response.headers.get("Location", ""),
        "messages": messages,
        "seconds": seconds,
        "busy": busy,
        "queries": {alias: [q["sql"] for q in queries] for alias, queries in captured.items()},
    }


if __name__ == "__main__":
    main()
