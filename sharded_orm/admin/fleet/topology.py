"""The admin pages of the topology, the map of all nodes, shard groups and ranges.

The pages show the topology in use, the topology in the source (the store from which processes load
it), and earlier versions. A user can go back to an earlier version.
"""

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
    ask_service,
    first_sentences,
    sees_all,
)
from sharded_orm.models.after_migrate.permissions import may_access
from sharded_orm.operations import topology
from sharded_orm.operations.runs.redaction import without_accounts
from sharded_orm.operations.shards.detail import seconds_left
from sharded_orm.topology.document import Document
from sharded_orm.topology.sources.base import Process, Revision

#: The topology page lists at most this many versions of the topology, the latest ones.
_HISTORY = 50
#: A version number in a URL has at most this many digits, so it fits into 64 bits.
_DIGITS = 18
#: The page shows this sentence instead of a text that may name any shard group, if the user may not
#: look into all groups.
_WITHHELD = "It is told to those who may look into all groups."


class TopologyAdmin(FleetAdmin):
    """The pages "Topology": show versions and their differences, and go back to an earlier version."""

    def routes(self) -> Iterable[tuple[str, View, str]]:
        return [
            ("", self.topology_view, "changelist"),
            ("diff/", self.diff_view, "diff"),
            ("<int:version>/rollback/", self.rollback_view, "rollback"),
            ("<path:object_id>/change/", self.version_view, "change"),
        ]

    def topology_view(self, request: HttpRequest) -> HttpResponse:
        """Show the topology that this process uses, and the topology in the source.

        The source is the store from which processes load the topology. Costs up to three requests
        to the source.
        """
        began = time.monotonic()
        source, standing = runtime.source(), runtime.topology_status()
        held = ask_service(SOURCE, topology.current)
        history: list[Revision] | str = []
        processes: list[Process] | str | None = None
        # Send the next request to the source of the topology only if the source has answered the
        # previous request.
        if not isinstance(held, str):
            left = seconds_left(DEADLINE, began)
            history = ask_service(SOURCE, lambda: source.history(_HISTORY), within=left)
        if not isinstance(held, str) and not isinstance(history, str):
            processes = ask_service(SOURCE, source.processes, within=seconds_left(DEADLINE, began))
        errors = [text for text in (held, history, processes) if isinstance(text, str)]
        revisions: Sequence[Revision] = [] if isinstance(history, str) else history
        refused = first_sentences(standing.refused)
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
            else first_sentences(_changes(request, runtime.document(), held)),
            errors=errors,
            revisions=[
                {
                    "revision": revision,
                    "comment": _comment(request, revision),
                    "url": self.url("change", revision.version),
                    "current": index == 0,
                }
                for index, revision in enumerate(revisions)
            ],
            versions=[revision.version for revision in revisions],
            processes=_by_version(processes),
            diff_url=self.url("diff"),
        )

    # ##### Versions #####

    def diff_view(self, request: HttpRequest) -> HttpResponse:
        """Show how two versions of the topology differ.

        The URL parameters ``from`` and ``to`` have the numbers of the two versions.
        """
        first, last = (_version(request.GET.get(name, "")) for name in ("from", "to"))
        if first is None or last is None:
            return self.refuse(request, "Choose two versions to compare.", self.url("changelist"))
        return self._diff(request, f"Version {first} to {last}", first, last, DEADLINE)

    def version_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Show how one version of the topology differs from the version before.

        The page has a button for going back to the shown version.
        """
        version = _version(unquote(object_id))
        if version is None:
            raise Http404(f"There is no version {unquote(object_id)!r}.")
        began = time.monotonic()
        revisions = ask_service(SOURCE, lambda: runtime.source().history(_HISTORY))
        known: list[Revision] = [] if isinstance(revisions, str) else revisions
        earlier = [other.version for other in known if other.version < version]
        revision = next((other for other in known if other.version == version), None)
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
        def read() -> tuple[Document, Document]:
            return Document(0, {}, {}) if first is None else _revision(first), _revision(last)

        documents = _read_versions(read, within)
        missing = isinstance(documents, str)
        return self.page(
            request, "version", title, first=first, last=last,
            changes=[] if isinstance(documents, str) else first_sentences(_changes(request, *documents)),
            errors=[documents] if missing else [],
            writable=runtime.source().writable, **context,
        )  # fmt: skip

    def rollback_view(self, request: HttpRequest, version: int) -> HttpResponse:
        """Go back to an earlier version of the topology, after the user has seen the changes and
        confirmed.

        The content of the version is published once more, under a new version number.
        """
        if (refused := self.require_operator(request)) is not None:
            return refused
        if _version(str(version)) is None:
            raise Http404(f"There is no version {version!r}.")
        first, back = self.url("changelist"), self.url("change", version)
        step = Step(f"Version {version}", back)
        began = time.monotonic()
        # The rollback will replace the topology that the source has now, so show the differences
        # from that topology. This process may still use an older one.
        documents = _read_versions(lambda: (topology.held(), _revision(version)), DEADLINE)
        if isinstance(documents, str):
            return self.refuse(request, documents, first)
        held, again = documents
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
                    *(first_sentences(changes) or ["Nothing changes."]),
                ],
            )  # fmt: skip
            if question is not None:
                return question
        comment = f"back to version {version}, by {request.user.get_username()} in the admin"
        published = self.publish(
            request,
            lambda: topology.rollback(version, comment, expected=expected),
            first,
            step,
            within=seconds_left(DEADLINE, began),
        )
        if isinstance(published, HttpResponse):
            return published
        self.note(
            request, str(published.version), f"content of version {version} published once more"
        )
        return HttpResponseRedirect(first)


def _version(text: str) -> int | None:
    number = text.isascii() and text.isdigit() and len(text) <= _DIGITS
    return int(text) if number else None


def _revision(version: int) -> Document:
    return runtime.source().revision(version)


def _read_versions(read: Callable[[], T], within: float) -> T | str:
    """Return the result of ``read()``, which reads versions of the topology from the source.

    If ``read()`` fails or takes too long, return a sentence that says so. Also return one if
    ``read()`` raises ``LookupError``, which means that the source no longer has one of the
    versions. (:func:`ask_service` does not catch this error.)
    """
    try:
        return ask_service(SOURCE, read, within=within)
    except LookupError as exc:
        return str(exc.args[0]) if exc.args else str(exc)


def _changes(request: HttpRequest, before: Document, after: Document) -> list[str]:
    """Return the differences between two versions of the topology, as sentences.

    Differences of shard groups into which the user may not look are left out.
    """
    names = {*before.groups, *after.groups}
    hidden = tuple(f"group {name!r}" for name in names if not may_access(request.user, name))
    return [line for line in before.differences(after) if not line.startswith(hidden)]


def _comment(request: HttpRequest, revision: Revision) -> str:
    """Return the comment of a version of the topology.

    Return an empty text if the user may not look into all shard groups, because a comment may name
    any group.
    """
    return without_accounts(revision.comment) if sees_all(request) else ""


def _by_version(processes: Any) -> list[dict[str, Any]] | None:
    """Return the processes grouped by the version of the topology that they use, newest version
    first.

    Return None if the source did not answer, or keeps no list of processes.
    """
    if not isinstance(processes, list):
        return None
    by_version: dict[int, list[Process]] = {}
    for process in processes:
        by_version.setdefault(process.version, []).append(process)
    return [
        {
            "version": version,
            "count": len(group),
            "hosts": sorted({process.host for process in group})[:10],
        }
        for version, group in sorted(by_version.items(), reverse=True)
    ]
