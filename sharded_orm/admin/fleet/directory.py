"""The admin page that shows on which shard the rows of a shard key are, and why."""

from __future__ import annotations

import shlex
from collections import defaultdict
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from django.apps import apps
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect

from sharded_orm import runtime
from sharded_orm.admin.fleet.pages import (
    FleetAdmin,
    Step,
    ask_service,
    groups_of,
    require_group,
    sees_all,
)
from sharded_orm.exceptions import UnknownModel
from sharded_orm.models import Placement
from sharded_orm.models.sharding.options import ShardOptions, shard_options
from sharded_orm.operations.cache import cached_models, forget_key
from sharded_orm.operations.shards.where import (
    KeyLocation,
    PlacementEntry,
    directory_entry,
    sharded_model,
    where,
)
from sharded_orm.routing.directory import DirectoryStrategy
from sharded_orm.topology.model import Shard

#: A page counts at most this many keys of a shard in the directory, the table that records the
#: shard of each key.
_MAX_COUNTED = 10_000


@dataclass(frozen=True)
class KeyReport:
    """What the page shows about a shard key: the shard to which it leads, and its entry in the directory.

    The directory is the table that records the shard of each key. ``entry`` is None if the
    directory has no entry for the key, or if the shard group of the key uses no directory.
    """

    location: KeyLocation
    entry: PlacementEntry | None
    has_directory: bool

    @property
    def differs(self) -> bool:
        """Whether this process remembers a different shard for the key than the directory has now.

        The directory is the table that records the shard of each key.
        """
        return (
            self.has_directory and (self.entry.shard if self.entry else None) != self.location.shard
        )


@dataclass(frozen=True)
class KeyCount:
    """The number of keys that the directory (the table of each key's shard) records for a shard.

    ``number`` is None if the directory does not answer. ``more`` is true if the shard has more keys
    than ``number``, because counting has stopped there.
    """

    number: int | None
    more: bool = False


class DirectoryPages(FleetAdmin):
    """Views that show the shard of a key, and that remove the data of a key from the cache."""

    def find_view(self, request: HttpRequest) -> HttpResponse:
        """Find the shard of the key that the URL parameters ``model``, ``field`` and ``value`` give.

        Without the parameter ``field``, the value is a shard key. Instead of ``model`` and
        ``field``, the URL may have the parameter ``by`` in the form ``model:field``. Costs at most
        two queries of the directory (the table of each key's shard); no shard is queried.
        """
        model, field = _model_and_field(request)
        value = request.GET.get("value", "")
        report, error = None, ""
        if model and value:
            outcome = _report(request, model, field, value)
            report, error = (None, outcome) if isinstance(outcome, str) else (outcome, "")
        location = report.location if report else None
        return self.page(
            request,
            "find",
            "Find a key",
            choices=_choices(request),
            chosen=f"{location.model}:{location.field}" if location else f"{model}:{field}",
            value=value,
            report=report,
            error=error,
            links=self._links(request, location) if location else (),
            may_forget=location is not None and _has_cached(location),
            move_command=_move_command(location, value) if location else "",
            forget_url=self.url("forget"),
            shard_url=self.url("shard", location.alias) if location and location.alias else "",
        )

    def _links(self, request: HttpRequest, location: KeyLocation) -> list[tuple[str, str]]:
        """Return links to the admin's lists of the rows that belong to the key.

        The result has a pair (name of the model, URL of its list of the key's rows) for each model
        of the shard group that is sharded by this key.
        """
        query = urlencode({"_key": location.key})
        return [
            (str(model._meta.verbose_name_plural), f"{url}?{query}")
            for model, options, url in self.changelists(request, location.group)
            if _is_key(options, location)
        ]

    def forget_view(self, request: HttpRequest) -> HttpResponse:
        """Ask the user for confirmation, then remove the data of a shard key from the cache."""
        if (refused := self.require_operator(request)) is not None:
            return refused
        model, field, value = (request.POST.get(name, "") for name in ("model", "field", "value"))
        query = urlencode({"model": model, "field": field, "value": value})
        back = f"{self.url('find')}?{query}"
        outcome = _report(request, model, field, value)
        if isinstance(outcome, str):
            return self.refuse(request, outcome, self.url("find"))
        location = outcome.location
        question = (
            f"Forget what is cached of {location.field} {location.key!r} in group {location.group}?"
        )
        confirm = self.confirm(
            request, question, back, Step("Find a key", back),
            consequences=["Its rows are read from the shard when they are asked for next."],
        )  # fmt: skip
        if confirm is not None:
            return confirm
        model_class = sharded_model(location.model).model
        try:
            labels = ask_service("the cache", lambda: forget_key(model_class, location.key))
        except (TypeError, ValueError) as exc:
            # forget_key() has refused the value, because a model of the shard group cannot have it
            # as a key. Show the reason to the user.
            labels = str(exc)
        if isinstance(labels, str):
            return self.refuse(request, labels, back)
        self.note(
            request, location.alias or location.group,
            f"forgot what was cached of {location.field} {location.key!r}: {', '.join(labels) or 'nothing'}",
        )  # fmt: skip
        return HttpResponseRedirect(back)


def _model_and_field(request: HttpRequest) -> tuple[str, str]:
    model, field = request.GET.get("model", ""), request.GET.get("field", "")
    if by := request.GET.get("by", ""):
        model, _, field = by.partition(":")
    return model, field


def _report(request: HttpRequest, model: str, field: str, value: str) -> KeyReport | str:
    """Return a report on one shard key. If the key cannot be found, return a sentence that says
    why.

    :param model: the label of a sharded model.
    :param field: the name of the field with the key; an empty string means the model's shard key.
    :param value: the key as typed.
    :raises PermissionDenied: the user may not look into the shard group of the key.
    """
    try:
        options = sharded_model(model)
    except UnknownModel as exc:
        # The text of UnknownModel lists the models of all shard groups. Show it only to users who
        # may look into all shard groups.
        return str(exc) if sees_all(request) else f"There is no sharded model {model!r}."
    require_group(request, options.group)
    name = field or (options.key.attname if options.key is not None else "pk")

    def look() -> KeyReport:
        location = where(options.model._meta.label, name, value)
        has_directory = isinstance(runtime.strategy(location.group), DirectoryStrategy)
        return KeyReport(location, directory_entry(location), has_directory)

    # look() reads the directory (the table of each key's shard), which may be on a server that does
    # not answer. So run look() in a thread, with a time limit.
    return ask_service("the directory", look)


def _choices(request: HttpRequest) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return what the user can choose in the search form, for each shard group that the user may
    look into.

    Each choice is a model and one of its fields: a field whose value determines the shard of a row.
    It is given as a pair: the value of the URL parameter ``by``, and the text to show.
    """
    allowed = groups_of(request)
    fields: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for model in apps.get_models():
        options = shard_options(model)
        if options is None or options.group not in allowed or model._meta.proxy:
            continue
        for field in model._meta.concrete_fields:
            if options.names_shard(field):
                fields[options.group].append(
                    (
                        f"{model._meta.label}:{field.attname}",
                        f"{model._meta.label}: {field.attname}",
                    )
                )
    return [(group, sorted(fields[group])) for group in allowed if fields[group]]


def _is_key(options: ShardOptions, location: KeyLocation) -> bool:
    """Whether the value that the user has searched for is a shard key of the model of ``options``.

    :param location: the result of the search, with the model and the field by which the user
        searched.
    """
    if options.key is None:
        return False
    label = options.model._meta.label
    if runtime.strategy(location.group).embedded is not None:
        return label == location.model and options.key.attname == location.field
    model_options = sharded_model(location.model)
    return model_options.key is not None and model_options.key.attname == location.field


def _move_command(location: KeyLocation, value: str) -> str:
    """Return the shell command that moves the key; an empty text if the key cannot be moved, or has
    no shard yet.

    :param value: the key as typed.
    """
    strategy = runtime.strategy(location.group)
    if not isinstance(strategy, DirectoryStrategy) or not strategy.moves_keys:
        return ""
    if location.alias is None or not _is_key(sharded_model(location.model), location):
        return ""
    return shlex.join(["manage.py", "keys", "move", location.group, value, "--to", "auto"])


def _has_cached(location: KeyLocation) -> bool:
    """Whether the cache may hold data of the key of ``location``.

    True if the user searched by the shard key and a model of the key's shard group is cached.
    """
    options = sharded_model(location.model)
    if options.key is None or options.key.attname != location.field:
        return False
    return any(
        cached.options is not None and cached.options.group == location.group
        for cached in cached_models()
    )


def keys_on(shard: Shard, *, within: float) -> KeyCount | None:
    """Return the number of keys that the directory records for ``shard``.

    The directory is the table that records the shard of each key. Return None if the shard group of
    ``shard`` uses no directory.

    :param within: seconds to wait for the directory.
    """
    if not isinstance(runtime.strategy(shard.group), DirectoryStrategy):
        return None

    def count() -> int:
        rows: Any = Placement.objects.using(runtime.config().directory)
        keys = rows.filter(group=shard.group, shard=shard.number)
        return int(keys[: _MAX_COUNTED + 1].count())

    number = ask_service("the directory", count, within=within)
    if isinstance(number, str):
        return KeyCount(None)
    return KeyCount(min(number, _MAX_COUNTED), number > _MAX_COUNTED)
