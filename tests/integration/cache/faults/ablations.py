"""Ablations: the real protocol with one part missing. The harness must notice each of them.

They exist only in the processes of these tests, and replace names of the library after it was
imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from tests.integration.cache.faults import failpoints


def replace_everywhere(old: Any, new: Any) -> None:
    """Replace ``old`` in all modules of the library that have imported it, under whatever name."""
    for name, module in list(sys.modules.items()):
        if name.startswith("sharded_orm"):
            for attribute, value in list(vars(module).items()):
                if value is old:
                    setattr(module, attribute, new)


def _guards_as(change: Callable[[Any, bytes], Any]) -> None:
    """Apply ``change`` to every parsed guard; it gets the guard and its raw form."""
    from sharded_orm.cache import guards

    parse = guards.parse
    replace_everywhere(parse, lambda raw: change(parse(raw), raw))


def _methods(name: str, wrapper: Callable[..., Any]) -> None:
    for cls in failpoints.servers():
        if failpoints.implements(cls, name):
            failpoints.wrap(cls, name, wrapper)


def bump_after_commit() -> None:
    """Guards change after COMMIT only."""
    waiting: list[tuple[Any, ...]] = []

    def mark(method: Any, server: Any, records: Any, *rest: Any) -> list[int]:
        waiting.append((method, server, records, *rest))
        return [0] * len(records)

    def finish(method: Any, server: Any, objects: Any, records: Any, lost: Any = None) -> None:
        while waiting:
            marked, *arguments = waiting.pop(0)
            marked(*arguments)
        method(server, objects, records, lost)

    _methods("mark", mark)
    _methods("finish", finish)


def no_markers() -> None:
    """Writers set no markers; they delete objects and change the guard after COMMIT."""
    _methods("mark", lambda method, server, records, *rest: [0] * len(records))


def heedless() -> None:
    """Guards change before and after COMMIT, but readers ignore open markers."""
    _guards_as(lambda guard, raw: guard._replace(open=()))


def one_slot() -> None:
    """A guard has room for one marker; closing any marker removes that one."""

    def change(guard: Any, raw: bytes) -> Any:
        slot = None
        for line in raw.decode().split("\n"):
            if line[:1] == "+":
                slot = line[1:].split(",")[0]
            elif line[:1] in ("-", "!"):
                slot = None
        return guard._replace(open=tuple(m for m in guard.open if m.token == slot))

    _guards_as(change)


def no_lease() -> None:
    """Readers store all rows that they have read, whatever has happened to their lease."""

    def fill(method: Any, server: Any, entries: Any, *rest: Any, **more: Any) -> Any:
        return method(server, [entry._replace(lease=None) for entry in entries], *rest, **more)

    _methods("fill", fill)


def same_generation() -> None:
    """A guard that is created again looks like the one that was lost."""
    from sharded_orm.cache import guards

    same = b"=" + b",".join([b"0" * 16] * 2)
    replace_everywhere(guards.header, lambda now: same + b",%d\n" % (now * 1000))


def counter() -> None:
    """The revision is a number that starts again after a loss, like Yupoo's."""
    _guards_as(lambda guard, raw: guard._replace(generation="0" * 16, digest=str(raw.count(b"\n"))))


def no_quarantine() -> None:
    """Readers store entries under a new guard at once."""
    _guards_as(lambda guard, raw: guard._replace(created=0.0))


def no_salt() -> None:
    """Closing a marker removes it, and leaves the guard as it was before."""
    from sharded_orm.cache import guards

    def change(guard: Any, raw: bytes) -> Any:
        tokens = [marker.token for marker in guard.open]
        return guard._replace(digest=guards.digest(guard.generation, *tokens))

    _guards_as(change)


def repair_without_asking() -> None:
    """An old marker counts as the marker of a dead writer."""
    from sharded_orm.cache.repair import Repairer

    class Nobody:
        def judges(self, writer: Any) -> bool:
            return True

        def gone(self, writers: Any) -> set[Any]:
            return set(writers)

    def repair(method: Any, repairer: Any, *arguments: Any, **more: Any) -> Any:
        server, scope, index, guard, _, *rest = arguments
        return method(repairer, server, scope, index, guard, Nobody(), *rest, **more)

    failpoints.wrap(Repairer, "repair", repair)


def one_look() -> None:
    """Each read fetches the guards once, so that rows may be newer or older than the list."""
    seen: dict[str, bytes | None] = {}

    def read(method: Any, server: Any, names: Any, objects: Any = (), again: Any = ()) -> Any:
        values, entries, _ = method(server, names, objects, again)
        seen.update(zip(names, values, strict=True))
        return values, entries, [seen.get(name) for name in again]

    failpoints.without_read_again()
    _methods("read", read)


def kept_for_ever() -> None:
    """A process that keeps the rows of a list takes them for valid, whatever the guards say."""
    from sharded_orm.cache.process_cache import ProcessCache

    class Anything(tuple[Any, ...]):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = tuple.__hash__

    def note_rows(method: Any, memory: Any, guard: str, query: str, kept: Any, **more: Any) -> None:
        method(memory, guard, query, kept._replace(guards=Anything(kept.guards)), **more)

    failpoints.wrap(ProcessCache, "note_rows", note_rows)


def unchanged_for_ever() -> None:
    """A server says that a row which the process knows is unchanged, whatever it has."""

    def read_again(method: Any, server: Any, *args: Any) -> Any:
        method(server, *args)

    for cls in failpoints.servers():
        if failpoints.implements(cls, "read_again"):
            failpoints.wrap(cls, "read_again", read_again)


ABLATIONS: dict[str, Callable[[], None]] = {
    made.__name__: made
    for made in (
        bump_after_commit, no_markers, heedless, one_slot, no_lease, same_generation, counter, no_quarantine, no_salt,
        repair_without_asking, one_look, kept_for_ever, unchanged_for_ever,
    )
}  # fmt: skip


def apply(name: str | None) -> None:
    if name is not None:
        from sharded_orm import models  # noqa: F401 -- imports all of the library

        ABLATIONS[name]()
