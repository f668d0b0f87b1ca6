"""The topology: what is in use, where it comes from, its history, and the way back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from django.contrib.admin.utils import unquote
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect

from sharded_orm import runtime
from sharded_orm.admin.fleet.pages import (
    DEADLINE,
    SOURCE,
    FleetAdmin,
    Step,
    T,
    View,
    asked,
    listed,
    sees_all,
)
from sharded_orm.models.after_migrate.permissions import may_access
from sharded_orm.operations import topology
from sharded_orm.operations.runs.redaction import without_accounts
from sharded_orm.operations.shards.detail import seconds_left
from sharded_orm.topology.document import Document
from sharded_orm.topology.sources.base import Process, Revision

#: Versions that the page lists.
_HISTORY = 50
#: Digits of a version: what a 64-bit number has for sure.
_DIGITS = 18
#: In place of what may name groups that the user may not look into.
_WITHHELD = "It is told to those who may look into all groups."


class TopologyAdmin(FleetAdmin):
    """ "Topology": versions, differences between them, and going back to one."""

    def routes(self) -> Iterable[tuple[str, View, str]]:
        return [
            ("", self.topology_view, "changelist"),
            ("diff/", self.diff_view, "diff"),
            ("<int:version>/rollback/", self.rollback_view, "rollback"),
            ("<path:object_id>/change/", self.version_view, "change"),
        ]

    def topology_view(self, request: HttpRequest) -> HttpResponse:
        """What this process uses, and what the source holds: two or three requests to it."""
        began = time.monotonic()
        source, standing = runtime.source(), runtime.topology_status()
        held = asked(SOURCE, topology.current)
        history: list[Revision] | str = []
        processes: list[Process] | str | None = None
        # A source that did not answer is not asked again and again.
        if not isinstance(held, str):
            left = seconds_left(DEADLINE, began)
            history = asked(SOURCE, lambda: source.history(_HISTORY), within=left)
        if not isinstance(held, str) and not isinstance(history, str):
            processes = asked(SOURCE, source.processes, within=seconds_left(DEADLINE, began))
        trouble = [told for told in (held, history, processes) if isinstance(told, str)]
        revisions: Sequence[Revision] = [] if isinstance(history, str) else history
        refused = listed(standing.refused)
        return self.page(
            request,
            "topology",
            "Topology",
            source=source.describe(),
            live=source.live,
            writable=source.writable,
            standing=standing,
            refused=refused if sees_all(request) or not refused else [_WITHHELD],
            held=held.version if isinstance(held, Document) else None,
            changes=[]
            if isinstance(held, str)
            else listed(_changes(request, runtime.document(), held)),
            trouble=trouble,
            revisions=[
                {
                    "it": one,
                    "comment": _comment(request, one),
                    "url": self.url("change", one.version),
                    "current": number == 0,
                }
                for number, one in enumerate(revisions)
            ],
            versions=[one.version for one in revisions],
            processes=_by_version(processes),
            diff_url=self.url("diff"),
        )

    # ##### Versions #####

    def diff_view(self, request: HttpRequest) -> HttpResponse:
        """What changes from version ``from`` to version ``to``."""
        first, last = (_version(request.GET.get(name, "")) for name in ("from", "to"))
        if first is None or last is None:
            return self.refuse(request, "Choose two versions to compare.", self.url("changelist"))
        return self._diff(request, f"Version {first} to {last}", first, last, DEADLINE)

    def version_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """What a version changed, and the way back to it."""
        version = _version(unquote(object_id))
        if version is None:
            raise Http404(f"There is no version {unquote(object_id)!r}.")
        began = time.monotonic()
        revisions = asked(SOURCE, lambda: runtime.source().history(_HISTORY))
        known: list[Revision] = [] if isinstance(revisions, str) else revisions
        earlier = [one.version for one in known if one.version < version]
        revision = next((one for one in known if one.version == version), None)
        return self._diff(
            request, f"Version {version}", max(earlier, default=None), version,
            seconds_left(DEADLINE, began),
            rollback_url=self.url("rollback", version),
            revision=revision,
            comment=_comment(request, revision) if revision is not None else "",
            is_current=bool(known) and known[0].version == version,
        )  # fmt: skip

    def _diff(
        self,
        request: HttpRequest,
        title: str,
        first: int | None,
        last: int,
        within: float,
        **context: Any,
    ) -> HttpResponse:
        def find() -> tuple[Document, Document]:
            return Document(0, {}, {}) if first is None else _revision(first), _revision(last)

        found = _asked_for_versions(find, within)
        missing = isinstance(found, str)
        return self.page(
            request, "version", title, first=first, last=last,
            changes=[] if isinstance(found, str) else listed(_changes(request, *found)),
            trouble=[found] if missing else [],
            writable=runtime.source().writable, **context,
        )  # fmt: skip

    def rollback_view(self, request: HttpRequest, version: int) -> HttpResponse:
        """Publish the content of ``version`` once more; asks first, and says what changes."""
        if (refused := self.require_operator(request)) is not None:
            return refused
        if _version(str(version)) is None:
            raise Http404(f"There is no version {version!r}.")
        first, back = self.url("changelist"), self.url("change", version)
        step = Step(f"Version {version}", back)
        began = time.monotonic()
        # What the source holds, not what this process uses: that is what is lost.
        found = _asked_for_versions(lambda: (topology.held(), _revision(version)), DEADLINE)
        if isinstance(found, str):
            return self.refuse(request, found, first)
        held, again = found
        expected = 0 if held is None else held.version
        before = held or runtime.document()
        changes = before.differences(again)
        if len(_changes(request, before, again)) < len(changes):
            return self.refuse(
                request,
                f"Version {version} differs in groups that you may not look into. Ask somebody who"
                " may look into all of them; nothing was published.",
                first,
            )
        if runtime.source().writable:
            question = self.confirm(
                request, f"Publish the content of version {version} once more?", back, step,
                expected=str(expected),
                consequences=[
                    "It becomes the next version, and every process that follows the source uses"
                    " it within moments.",
                    *(listed(changes) or ["Nothing changes."]),
                ],
            )  # fmt: skip
            if question is not None:
                return question
        comment = f"back to version {version}, by {request.user.get_username()} in the admin"
        made = self.publish(
            request,
            lambda: topology.rollback(version, comment, expected=expected),
            first,
            step,
            within=seconds_left(DEADLINE, began),
        )
        if isinstance(made, HttpResponse):
            return made
        self.note(request, str(made.version), f"content of version {version} published once more")
        return HttpResponseRedirect(first)


def _version(text: str) -> int | None:
    number = text.isascii() and text.isdigit() and len(text) <= _DIGITS
    return int(text) if number else None


def _revision(version: int) -> Document:
    return runtime.source().revision(version)


def _asked_for_versions(find: Callable[[], T], within: float) -> T | str:
    """As :func:`asked`, of a source that may not keep some version any more."""
    try:
        return asked(SOURCE, find, within=within)
    except LookupError as exc:
        return str(exc.args[0]) if exc.args else str(exc)


def _changes(request: HttpRequest, before: Document, after: Document) -> list[str]:
    """From one document to the other, without groups that the user may not look into."""
    names = {name for one in (before, after) for name in one.groups}
    hidden = tuple(f"group {name!r}" for name in names if not may_access(request.user, name))
    return [line for line in before.differences(after) if not line.startswith(hidden)]


def _comment(request: HttpRequest, revision: Revision) -> str:
    """Written by people and by commands, it may name any group."""
    return without_accounts(revision.comment) if sees_all(request) else ""


def _by_version(processes: Any) -> list[dict[str, Any]] | None:
    """How many processes use which version; None where the source does not know them."""
    if not isinstance(processes, list):
        return None
    found: dict[int, list[Process]] = {}
    for one in processes:
        found.setdefault(one.version, []).append(one)
    return [
        {"version": version, "count": len(those), "hosts": sorted({one.host for one in those})[:10]}
        for version, those in sorted(found.items(), reverse=True)
    ]
