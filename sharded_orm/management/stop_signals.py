"""Stop a long command cleanly when a signal such as SIGINT arrives."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from sharded_orm.operations.runs.rollout import Stopping


class SignalStopping(Stopping):
    """A stop flag that a signal sets. The work checks the flag, and stops if it is set.

    ``status`` is the exit status of the command if the command fails. It is 128 plus the number of
    the signal if a signal has stopped the command; otherwise 1.
    """

    status = 1

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.status = 128 + signum
        self.stop(f"stopped by {signal.Signals(signum).name}")
        signal.signal(signum, signal.SIG_DFL)
        # Use os.write(), not sys.stderr: the signal may have interrupted a write to sys.stderr, and
        # a second write to it, inside the first one, would raise an error.
        os.write(
            2, b"\nStopping after the statement under way. Once more kills; both can be resumed.\n"
        )


@contextmanager
def stop_signals() -> Iterator[SignalStopping]:
    """Context manager: within its block, the signals SIGINT and SIGTERM set a stop flag.

    Yields the flag. The command must check it now and then, and stop if it is set. A second signal
    of the same kind kills the process.

    Python allows signal handlers in the main thread only. In another thread, no handler is
    installed, and no signal sets the flag.
    """
    stopping = SignalStopping()
    if threading.current_thread() is not threading.main_thread():
        yield stopping
        return
    signums = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(signum, stopping.on_signal) for signum in signums]
    try:
        yield stopping
    finally:
        for signum, handler in zip(signums, before, strict=True):
            signal.signal(signum, handler)
