"""A small process that owns one server and dies with the process that started it.

Started as ``python keeper.py FOLDER COMMAND…``. It reads one command per line from its
standard input and answers each with one line:

========== ========================================= ==============
start      start the server                          ``pid N``
end SIGNAL send it the signal of this number, wait   ``exit CODE``
========== ========================================= ==============

The server runs as the owner of FOLDER. When the server ends, the keeper kills the children
that it leaves behind before it answers (PostgreSQL's would go on for a moment and keep another
server from starting on their data).

The keeper kills the server and removes FOLDER on SIGTERM, or when its input ends because the
parent closed it or died in whatever way. A pipe needs no cooperation from a dying parent. And
unlike PR_SET_PDEATHSIG, it does not fire when merely the thread that started the server ends.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(how: int = signal.SIGKILL) -> None:
    """Have the kernel send ``how`` to this process when its parent dies (Linux only).

    More exactly: when the thread that started it ends.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, how)


def children_of(pid: int) -> list[int]:
    """Return the processes that ``pid`` has started or inherited (Linux only)."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as children:
            return [int(child) for child in children.read().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def end_orphans() -> None:
    """Kill the processes that a server has left to us, and wait for them."""
    while orphans := children_of(os.getpid()):
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def main(folder: str, command: list[str]) -> None:
    server: subprocess.Popen[bytes] | None = None
    owner = os.stat(folder)
    as_owner: dict[str, Any] = {}
    if owner.st_uid != os.geteuid():
        as_owner = {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []}
    if sys.platform == "linux":
        # When the server dies, its children become ours.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)

    def end(signum: int, frame: object) -> None:
        raise SystemExit

    signal.signal(signal.SIGTERM, end)
    # Ctrl-C is for the parent, which decides when it needs the server no more.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def finish(how: int) -> str:
        if server is None:
            return "exit 0"
        server.send_signal(how)
        code = server.wait()
        end_orphans()
        return f"exit {code}"

    try:
        with open(os.path.join(folder, "output.log"), "ab") as output:
            for line in sys.stdin:
                order = line.strip()
                if order == "start":
                    server = subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        cwd=folder,
                        # This process has one thread, so its death is the parent's death. It runs
                        # as the owner already: a change of user clears this setting.
                        preexec_fn=die_with_parent,
                        **as_owner,
                    )
                    answer = f"pid {server.pid}"
                else:
                    answer = finish(int(order.removeprefix("end ")))
                    server = None
                print(answer, flush=True)
    finally:
        # Nothing reads the folder again, so no clean shutdown is needed.
        finish(signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
