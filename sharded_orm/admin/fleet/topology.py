"""The topology: what is in use, where it comes from, its history, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from django.contrib import messages
from django.contrib.admin.utils import unquote
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect

from sharded_orm import runtime
from sharded_orm.admin.fleet.pages import DEADLINE, FleetAdmin, Step, View, groups_of
from sharded_orm.exceptions import TopologyError, TopologyReadOnly
from sharded_orm.operations import topology
from sharded_orm.operations.nodes import ask_nodes
from sharded_orm.topology.document import Document
from sharded_orm.topology.sources.base import Process, Revision

T = TypeVar("T")

#: Versions that the page lists.
_HISTORY = 50
_SOURCE = "the source of the topology"


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
        source, standing = runtime.source(), runtime.standing()
        held = _asked(topology.current)
        # A source that did not answer is not asked again and again.
        asked = not isinstance(held, str)
        history = _asked(lambda: source.history(_HISTORY)) if asked else []
        processes = _asked(source.processes) if asked else None
        trouble = [told for told in (held, history, processes) if isinstance(told, str)]
        revisions: Sequence[Revision] = history if isinstance(history, list) else []
        return self.page(
            request,
            "topology",
            "Topology",
            source=source.describe(),
            live=source.live,
            writable=source.writable,
            standing=standing,
            held=held.version if isinstance(held, Document) else None,
            changes=self._changes(request, runtime.document(), held),
            trouble=trouble,
            revisions=[
                {"it": one, "url": self.url("change", one.version), "current": number == 0}
                for number, one in enumerate(revisions)
            ],
            versions=[one.version for one in revisions],
            processes=_by_version(processes),
            diff_url=self.url("diff"),
        )

    def _changes(self, request: HttpRequest, before: Document, after: Document | str) -> list[str]:
        """From one document to the other, without groups that the user may not look into."""
        if isinstance(after, str):
            return []
        allowed = groups_of(request)
        hidden = {name for one in (before, after) for name in one.groups if name not in allowed}
        return [
            line
            for line in before.differences(after)
            if not any(line.startswith(f"group {name!r}") for name in hidden)
        ]

    # ##### Versions #####

    def diff_view(self, request: HttpRequest) -> HttpResponse:
        """What changes from version ``from`` to version ``to``."""
        try:
            first, last = (int(request.GET.get(name, "")) for name in ("from", "to"))
        except ValueError:
            messages.error(request, "Choose two versions to compare.")
            return HttpResponseRedirect(self.url("changelist"))
        return self._diff(request, f"Version {first} to {last}", first, last)

    def version_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """What a version changed, and the way back to it."""
        text = unquote(object_id)
        if not text.isascii() or not text.isdigit():
            raise Http404(f"There is no version {text!r}.")
        version = int(text)
        revisions = _asked(lambda: runtime.source().history(_HISTORY))
        listed: list[Revision] = revisions if isinstance(revisions, list) else []
        earlier = [one.version for one in listed if one.version < version]
        return self._diff(
            request, f"Version {version}", max(earlier, default=None), version,
            rollback_url=self.url("rollback", version),
            revision=next((one for one in listed if one.version == version), None),
            is_current=bool(listed) and listed[0].version == version,
        )  # fmt: skip

    def _diff(
        self, request: HttpRequest, title: str, first: int | None, last: int, **context: Any
    ) -> HttpResponse:
        before = Document(0, {}, {}) if first is None else _revision(first)
        after = _revision(last)
        trouble = [told for told in (before, after) if isinstance(told, str)]
        changes = [] if trouble else self._changes(request, before, after)  # type: ignore[arg-type]  # documents, without trouble
        return self.page(
            request, "version", title, first=first, last=last, changes=changes, trouble=trouble,
            writable=runtime.source().writable, **context,
        )  # fmt: skip

    def rollback_view(self, request: HttpRequest, version: int) -> HttpResponse:
        """Publish the content of ``version`` once more; asks first, and says what changes."""
        if (refused := self.require_operator(request)) is not None:
            return refused
        back = self.url("change", version)
        step = Step(f"Version {version}", back)
        again = _revision(version)
        try:
            if isinstance(again, str):
                raise TopologyError(again)
            if runtime.source().writable:
                asked = self.confirm(
                    request, f"Publish the content of version {version} once more?", back, step,
                    consequences=[
                        "It becomes the next version, and every process that follows the source uses"
                        " it within moments.",
                        *(self._changes(request, runtime.document(), again) or ["Nothing changes."]),
                    ],
                )  # fmt: skip
                if asked is not None:
                    return asked
            who = request.user.get_username()
            made = topology.rollback(version, f"back to version {version}, by {who} in the admin")
        except TopologyReadOnly as exc:
            return self.page(
                request, "by_hand", "To be changed by hand", step, told=str(exc), back=back
            )
        except (TopologyError, LookupError) as exc:
            messages.error(request, str(exc))
            return HttpResponseRedirect(self.url("changelist"))
        self.note(request, str(made.version), f"content of version {version} published once more")
        return HttpResponseRedirect(self.url("changelist"))


def _asked(ask: Callable[[], T]) -> T | str:
    """What the source tells within the time; or in a sentence, why it does not."""
    (outcome,) = ask_nodes([_SOURCE], lambda name, alive: ask(), patience=DEADLINE).values()
    if isinstance(outcome, TopologyError):
        return str(outcome)
    return f"{_SOURCE.capitalize()}: {outcome}" if isinstance(outcome, Exception) else outcome


def _revision(version: int) -> Document | str:
    def find() -> Document | str:
        try:
            return runtime.source().revision(version)
        except LookupError as exc:
            return str(exc.args[0]) if exc.args else str(exc)

    return _asked(find)


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
