"""The topology source that reads a file on each machine.

The file is distributed to the machines by configuration management, or is on a mounted volume.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from sharded_orm.exceptions import InvalidConfiguration, TopologyUnavailable
from sharded_orm.topology.document import Document
from sharded_orm.topology.sources.base import OnChange, TopologySource, arrived

_DEFAULT_INTERVAL = 1.0


class FileSource(TopologySource):
    """A topology source that reads a file: TOML if its name ends in ``.toml``, and otherwise JSON.

    Every ``INTERVAL`` seconds (default 1), the file is read again if its change time, size or inode
    has changed. To change the document, write a new file with a higher version, and ``rename`` it
    to the path of the old file. Then no process reads a half-written file.
    """

    option_names = frozenset({"PATH", "INTERVAL"})
    required = frozenset({"PATH"})
    writable: ClassVar[bool] = False

    def __init__(self, options: Mapping[str, Any], setting: Mapping[str, Any]) -> None:
        super().__init__(options, setting)
        interval = options.get("INTERVAL", _DEFAULT_INTERVAL)
        number = isinstance(interval, (int, float)) and not isinstance(interval, bool)
        if not number or not 0 < interval <= threading.TIMEOUT_MAX:
            raise InvalidConfiguration(
                [f"TOPOLOGY: INTERVAL must be a positive number of seconds, not {interval!r}"]
            )
        self._path = Path(options["PATH"])
        self._interval = float(interval)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def describe(self) -> str:
        return f"the file {str(self._path)!r}"

    def load(self) -> Document | None:
        try:
            return Document.from_file(self._path)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise TopologyUnavailable(f"The topology cannot be read: {exc}.") from exc

    def start(self, on_change: OnChange) -> None:
        self._thread = threading.Thread(
            target=self._watch, args=(on_change,), name="topology-file", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self, on_change: OnChange) -> None:
        seen: object = None
        while True:
            stamp = self._stamp()
            if stamp != seen:
                document = arrived(self.load)
                # If the file is missing, ``document`` is None. Do not report this, because
                # somebody is probably about to replace the file.
                if document is not None:
                    on_change(document)
                seen = stamp
            if self._ended.wait(self._interval):
                return

    def _stamp(self) -> object:
        try:
            stat = os.stat(self._path)
        except OSError as exc:
            return exc.errno
        # Use st_ctime, because st_mtime would miss two changes: a new file that was copied with its
        # old st_mtime, and a chmod that makes the file readable.
        return stat.st_ctime_ns, stat.st_size, stat.st_ino
