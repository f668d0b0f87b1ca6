"""A small process that owns one server and dies with whoever asked for it.

Started as ``python keeper.py FOLDER COMMAND…``. It reads one command per line from its
standard input and answers each with one line:

====== ============================= ==============
start  start the server              ``pid N``
stop   SIGTERM it, wait              ``exit CODE``
kill   SIGKILL it, wait              ``exit CODE``
====== ============================= ==============

When its input ends (because the parent closed it, or died in whatever way) or on
SIGTERM, it kills the server and removes FOLDER. A pipe needs no cooperation from a dying
parent, and unlike PR_SET_PDEATHSIG it does not fire when merely the thread that started
the server ends.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(how: int = signal.SIGKILL) -> None:
    """Have the kernel send ``how`` to this process when its parent dies (Linux only).

    More exactly: when the thread that started it ends.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, how)


def main(folder: str, command: list[str]) -> None:
    server: subprocess.Popen[bytes] | None = None

    def end(signum: int, frame: object) -> None:
        raise SystemExit

    signal.signal(signal.SIGTERM, end)
    # Ctrl-C is for the parent; it decides when it has no more use for the server.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def finish(how: str) -> str:
        if server is None:
            return "exit 0"
        server.terminate() if how == "stop" else server.kill()
        return f"exit {server.wait()}"

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
                        # This process has one thread, so its death is the parent's death.
                        preexec_fn=die_with_parent,
                    )
                    answer = f"pid {server.pid}"
                else:
                    answer = finish(order)
                    server = None
                print(answer, flush=True)
    finally:
        # Nothing in the folder will be read again: no clean shutdown is needed.
        finish("kill")
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
