"""A process of the site whose topology changes: ``python -m …project FILE COMMAND…``.

FILE is a JSON file with the settings. COMMAND is one of ``manage.py``, or ``serve``. A process
that serves runs each line of standard input as code in JSON, and answers with the value of the
name ``answer``.
"""

from __future__ import annotations

import io
import json
import logging
import os
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from tests.site_settings import NO_SITE, import_commands, set_up_django


def configure(content: dict[str, Any]) -> None:
    # A buffered stream has a lock. A child that is forked while another thread writes to the stream
    # would wait for that lock for ever when it logs.
    stream = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), write_through=True)
    logging.basicConfig(
        format="%(levelname)s %(name)s %(message)s", level=logging.WARNING, stream=stream
    )
    logging.getLogger("sharded_orm.topology").setLevel(logging.INFO)
    from sharded_orm.topology.aliases import sharded_databases

    set_up_django(
        DATABASES=sharded_databases(content["databases"]),
        INSTALLED_APPS=[
            "django.contrib.contenttypes",
            "sharded_orm",
            "tests.integration.topology.places",
        ],
        DATABASE_ROUTERS=["sharded_orm.routers.ShardRouter"],
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        SHARDED_ORM=content["sharded_orm"],
        LOGGING_CONFIG=None,
        USE_TZ=True,
    )


def prepare() -> None:
    """Set Django up for processes that are forked from this one."""
    configure(NO_SITE)
    import_commands()


# ##### Functions for the code that a test sends #####


def version() -> int:
    from sharded_orm import runtime

    return runtime.topology().version


def place(alias: str = "photos_00000") -> str:
    """Return the node that the next statement on ``alias`` reaches."""
    from django.db import connections

    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT node FROM places_place")
        ((node,),) = cursor.fetchall()
    return str(node)


def row(connection: Any) -> str:
    with connection.cursor() as cursor:
        cursor.execute("SELECT node FROM places_place")
        return str(cursor.fetchall()[0][0])


def sql(alias: str, statement: str) -> None:
    from django.db import connections

    with connections[alias].cursor() as cursor:
        cursor.execute(statement)


def rename(alias: str, node: str) -> None:
    sql(alias, f"UPDATE places_place SET node = '{node}'")


def more_rows(alias: str, count: int) -> None:
    values = ", ".join(f"({number}, 0, 'more')" for number in range(1000, 1000 + count))
    sql(alias, f"INSERT INTO places_place VALUES {values}")


def in_atomic(using: str, alias: str) -> str:
    from django.db import transaction

    with transaction.atomic(using=using):
        return place(alias)


_block = threading.local()


def begin(alias: str) -> None:
    from django.db import transaction

    _block.open = transaction.atomic(using=alias)
    _block.open.__enter__()
    place(alias)


def end() -> None:
    _block.open.__exit__(None, None, None)


def scattered() -> list[str]:
    from tests.integration.topology.places.models import Place

    return sorted(Place.objects.scatter().values_list("node", flat=True))


def server_name() -> str:
    """Return the server that the group's alias queries."""
    from django.db import connections

    settings = connections["photos"].server.settings_dict  # type: ignore[attr-defined]  # our own attribute
    return f"{settings['HOST']}:{settings['PORT']}"


def node_name(node: str) -> str:
    from sharded_orm import runtime

    settings = runtime.topology().nodes[node]
    return f"{settings.get('HOST', '')}:{settings.get('PORT', '')}"


def queries(alias: str, function: Any) -> list[Any]:
    """Return the result of ``function``, and the number of queries it made on ``alias``."""
    from django.db import connections
    from django.test.utils import CaptureQueriesContext

    with CaptureQueriesContext(connections[alias]) as captured:
        result = function()
    return [result, len(captured)]


def session() -> list[Any]:
    """Return the id and the password of this process's session with ZooKeeper."""
    from sharded_orm import runtime

    source: Any = runtime.source()
    number, password = source._client.client_id
    return [number, password.hex()]


def change(number: int, value: int) -> None:
    """Change one setting of a node, whatever other processes change meanwhile."""
    from sharded_orm.operations import topology
    from sharded_orm.topology.document import Document

    def edit(before: Document) -> Document:
        content = before.content()
        node = content["nodes"].setdefault(("one", "two")[number % 2], {})
        node.setdefault("OPTIONS", {})[f"n{number}"] = value
        return Document.from_content(content)

    topology.change(edit)


def push(content: dict[str, Any]) -> str:
    """Push a document; return the error, or an empty string if it is published."""
    from sharded_orm.operations import topology
    from sharded_orm.topology.document import Document

    return refusal(lambda: topology.push(Document.from_content(content)))


def refusal(function: Any, *arguments: Any) -> str:
    """Return the error of a change of the topology, or an empty string if it is published."""
    from sharded_orm.exceptions import TopologyError

    try:
        function(*arguments)
    except TopologyError as exc:
        return str(exc)
    return ""


def refused() -> str:
    from sharded_orm import runtime

    return "\n".join(runtime.topology_status().refused)


_child: Any = None


def fork() -> int:
    """Fork a child that answers expressions, like a worker of a server that preloads the site."""
    global _child
    mine, its = socket.socketpair()
    pid = os.fork()
    here, there = (mine, its) if pid else (its, mine)
    there.close()
    pipe = here.makefile("rw")
    here.close()
    if pid:
        _child = pipe
        return pid
    with pipe:
        for line in pipe:
            if line == "end\n":
                break
            print(json.dumps(eval(line, dict(globals()))), file=pipe, flush=True)
    sys.exit()


def of_child(expression: str) -> Any:
    print(expression, file=_child, flush=True)
    if expression != "end":
        return json.loads(_child.readline())
    assert _child.readline() == ""
    _child.close()
    return None


class Worker:
    """A thread that calls functions one by one, like a thread of a server."""

    def __init__(self) -> None:
        self._ready, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._call: Any = None
        self.result: Any = None
        threading.Thread(target=self._run, daemon=True).start()

    def __call__(self, function: Any, *args: Any) -> Any:
        self._call = function, args
        self._ready.release()
        self._done.acquire()
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result

    def _run(self) -> None:
        while True:
            self._ready.acquire()
            function, args = self._call
            try:
                self.result = function(*args)
            except BaseException as exc:
                self.result = exc
            self._done.release()


def serve() -> None:
    from django.core.management import call_command
    from django.db import connections, transaction

    from sharded_orm import database_settings, runtime
    from sharded_orm.autonomous_connections import AutonomousConnections
    from sharded_orm.backends.group import relocation
    from sharded_orm.backends.pool import pools
    from tests.integration.topology.places.models import Place

    names = {
        **globals(),
        "Place": Place,
        "autonomous": AutonomousConnections(),
        "call_command": call_command,
        "connections": connections,
        "database_settings": database_settings,
        "relocation": relocation,
        "pools": pools,
        "runtime": runtime,
        "transaction": transaction,
    }
    for line in sys.stdin:
        names["answer"] = None
        try:
            exec(json.loads(line), names)
            answer = {"answer": names["answer"]}
        except Exception as exc:
            traceback.print_exc()
            answer = {"error": f"{type(exc).__name__}: {exc}"}
        print(json.dumps(answer), flush=True)


def main() -> None:
    settings_file, command, *arguments = sys.argv[1:]
    # As manage.py does: the app checks which command runs.
    sys.argv = ["manage.py", command, *arguments]
    content = json.loads(Path(settings_file).read_text())
    configure(content)
    if command == "serve":
        serve()
        return
    from django.core.management import execute_from_command_line

    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
