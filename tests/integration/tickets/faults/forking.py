"""A program that forks while it draws ids; ``test_forks`` runs it.

Its arguments are a file with the pickled project, a sequence, whether a second thread draws
all the time, and how the children end: by ``exit``, before which Python cleans up and closes
open objects, or by ``_exit``. It prints the ids and connections as JSON.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE

#: Children by their end. Python takes a fifth of a second to clean up after each that ends by ``exit``.
CHILDREN = {"exit": 4, "_exit": 10}
EACH = 30


def main(project: Any, sequence: str, busy: bool, end: str) -> None:
    project.configure()
    generator = project.generator()
    # Now the process has a connection to each server, and holds the rest of a block.
    parents = [generator.next(sequence) for _ in range(EACH)]
    sessions = [_session(server) for server in generator.servers]
    stop = threading.Event()

    def draw() -> None:
        while not stop.is_set():
            parents.append(generator.next(sequence))

    thread = threading.Thread(target=draw)
    if busy:
        # Its connections and locks are in use whenever the other thread forks.
        thread.start()
        # Draw at the same time, so that both threads have opened their connections before the first
        # fork. OpenSSL does not allow a fork while another thread opens a connection of PostgreSQL.
        while len(parents) < 10 * EACH:
            parents.append(generator.next(sequence))
    reader, writer = os.pipe()
    for number in range(CHILDREN[end]):
        if not os.fork():
            # Every second child draws nothing; it has to leave the connections alone as well.
            theirs = [generator.next(sequence) for _ in range(EACH * (number % 2))]
            os.write(writer, json.dumps(theirs).encode() + b"\n")
            if end == "_exit":
                os._exit(0)
            return
        parents.append(generator.next(sequence))
    ends = [os.wait()[1] for _ in range(CHILDREN[end])]
    stop.set()
    if busy:
        thread.join()
    os.close(writer)
    with open(reader) as lines:
        children = [json.loads(line) for line in lines]
    kept = [
        _session(server) is session
        for server, session in zip(generator.servers, sessions, strict=True)
    ]
    parents += [generator.next(sequence) for _ in range(EACH)]
    print(json.dumps({"ids": [parents, *children], "ends": ends, "kept": kept}))


def _session(server: Any) -> Any:
    """Return the connection that is used next, after one more use."""
    deadline = time.monotonic() + PATIENCE

    def use(session: Any) -> Any:
        session.execute("SELECT 1", (), deadline)
        return session

    with server.session(deadline) as lent:
        return lent.ask(use)


if __name__ == "__main__":
    main(
        pickle.loads(Path(sys.argv[1]).read_bytes()), sys.argv[2], "busy" in sys.argv, sys.argv[-1]
    )
