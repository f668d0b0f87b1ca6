"""Find a key: which shard has its rows, and why."""

from __future__ import annotations

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
    asked,
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

#: Keys of a shard that are counted in the directory.
_COUNTED = 10_000


@dataclass(frozen=True)
class KeyReport:
    """What was found out about a key."""

    place: KeyLocation
    entry: PlacementEntry | None
    has_directory: bool

    @property
    def differs(self) -> bool:
        """Whether this process remembers another placement than the directory has."""
        return self.has_directory and (self.entry.shard if self.entry else None) != self.place.shard


@dataclass(frozen=True)
class KeyCount:
    """How many keys the directory places on a shard; None where it does not answer."""

    number: int | None
    more: bool = False


class DirectoryPages(FleetAdmin):
    """The page that finds a key, and what can be done with one."""

    def find_view(self, request: HttpRequest) -> HttpResponse:
        """``model``, ``field`` (by default the shard key) and ``value``; or ``by`` for the first two.

        One query of the directory, or two; no shard is asked.
        """
        model, field = _wanted(request)
        value = request.GET.get("value", "")
        told, error = None, ""
        if model and value:
            outcome = _found(request, model, field, value)
            told, error = (None, outcome) if isinstance(outcome, str) else (outcome, "")
        return self.page(
            request,
            "find",
            "Find a key",
            choices=_choices(request),
            chosen=f"{told.place.model}:{told.place.field}" if told else f"{model}:{field}",
            value=value,
            told=told,
            error=error,
            links=self._links(request, told.place) if told else (),
            may_forget=told is not None and _has_cached(told.place),
            forget_url=self.url("forget"),
            shard_url=self.url("shard", told.place.alias) if told and told.place.alias else "",
        )

    def _links(self, request: HttpRequest, place: KeyLocation) -> list[tuple[str, str]]:
        """The models of the group whose changelist can show the rows of the key."""
        query = urlencode({"_key": place.key})
        return [
            (str(model._meta.verbose_name_plural), f"{url}?{query}")
            for model, options, url in self.changelists(request, place.group)
            if _is_key(options, place)
        ]

    def forget_view(self, request: HttpRequest) -> HttpResponse:
        """Make void what is cached of a key; asks first."""
        if (refused := self.require_operator(request)) is not None:
            return refused
        model, field, value = (request.POST.get(name, "") for name in ("model", "field", "value"))
        query = urlencode({"model": model, "field": field, "value": value})
        back = f"{self.url('find')}?{query}"
        outcome = _found(request, model, field, value)
        if isinstance(outcome, str):
            return self.refuse(request, outcome, self.url("find"))
        place = outcome.place
        question = f"Forget what is cached of {place.field} {place.key!r} in group {place.group}?"
        confirm = self.confirm(
            request, question, back, Step("Find a key", back),
            consequences=["Its rows are read from the shard when they are asked for next."],
        )  # fmt: skip
        if confirm is not None:
            return confirm
        model_of = sharded_model(place.model).model
        try:
            labels = asked("the cache", lambda: forget_key(model_of, place.key))
        except (TypeError, ValueError) as exc:  # No key of another model of the group.
            labels = str(exc)
        if isinstance(labels, str):
            return self.refuse(request, labels, back)
        self.note(
            request, place.alias or place.group,
            f"forgot what was cached of {place.field} {place.key!r}: {', '.join(labels) or 'nothing'}",
        )  # fmt: skip
        return HttpResponseRedirect(back)


def _wanted(request: HttpRequest) -> tuple[str, str]:
    model, field = request.GET.get("model", ""), request.GET.get("field", "")
    if by := request.GET.get("by", ""):
        model, _, field = by.partition(":")
    return model, field


def _found(request: HttpRequest, model: str, field: str, value: str) -> KeyReport | str:
    """What is known of a key, or one sentence that says why nothing can be told.

    :raises PermissionDenied: the group is none of the user's.
    """
    try:
        options = sharded_model(model)
    except UnknownModel as exc:
        # It lists the models of all groups.
        return str(exc) if sees_all(request) else f"There is no sharded model {model!r}."
    require_group(request, options.group)
    name = field or (options.key.attname if options.key is not None else "pk")

    def look() -> KeyReport:
        place = where(options.model._meta.label, name, value)
        has_directory = isinstance(runtime.strategy(place.group), DirectoryStrategy)
        return KeyReport(place, directory_entry(place), has_directory)

    # In a thread, as nodes: the directory may be a server that does not answer.
    return asked("the directory", look)


def _choices(request: HttpRequest) -> list[tuple[str, list[tuple[str, str]]]]:
    """Group -> the fields whose values tell the shard, as ``by`` and as text."""
    allowed = groups_of(request)
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for model in apps.get_models():
        options = shard_options(model)
        if options is None or options.group not in allowed or model._meta.proxy:
            continue
        for field in model._meta.concrete_fields:
            if options.names_shard(field):
                found[options.group].append(
                    (
                        f"{model._meta.label}:{field.attname}",
                        f"{model._meta.label}: {field.attname}",
                    )
                )
    return [(group, sorted(found[group])) for group in allowed if found[group]]


def _is_key(options: ShardOptions, place: KeyLocation) -> bool:
    """Whether the key of ``place`` is one of this model's, too."""
    if options.key is None:
        return False
    label = options.model._meta.label
    if runtime.strategy(place.group).embedded is not None:
        return label == place.model and options.key.attname == place.field
    asked = sharded_model(place.model)
    return asked.key is not None and asked.key.attname == place.field


def _has_cached(place: KeyLocation) -> bool:
    """Whether the models of the group are cached, and ``place`` was found by its shard key."""
    options = sharded_model(place.model)
    if options.key is None or options.key.attname != place.field:
        return False
    return any(
        found.options is not None and found.options.group == place.group
        for found in cached_models()
    )


def keys_on(shard: Shard, *, within: float) -> KeyCount | None:
    """How many keys the directory places on ``shard``, up to a bound; None without a directory.

    :param within: seconds for the directory.
    """
    if not isinstance(runtime.strategy(shard.group), DirectoryStrategy):
        return None

    def count() -> int:
        rows: Any = Placement.objects.using(runtime.config().directory)
        found: int = rows.filter(group=shard.group, shard=shard.number)[: _COUNTED + 1].count()
        return found

    number = asked("the directory", count, within=within)
    if isinstance(number, str):
        return KeyCount(None)
    return KeyCount(min(number, _COUNTED), number > _COUNTED)
