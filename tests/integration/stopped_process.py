"""A process that stops itself, as one that somebody has suspended, and goes on later."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.patience import PATIENCE
from tests.python_process import PythonProcess


def wait_until_stopped(process: PythonProcess) -> None:
    """Wait until the process has sent itself SIGSTOP."""
    deadline = time.monotonic() + PATIENCE
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert process.poll() is None, process.communicate(timeout=PATIENCE)
        assert time.monotonic() < deadline, "the process has not stopped"
        time.sleep(0.02)  # between two looks


def go_on(process: PythonProcess) -> tuple[str, str]:
    """Let the process go on to its end, and return what it has written."""
    os.kill(process.pid, signal.SIGCONT)
    return process.communicate(timeout=PATIENCE)
