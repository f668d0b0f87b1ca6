"""The document that a topology source holds: what changes while processes run.

Pure: no Django, no drivers. It has the shape of ``NODES`` and ``GROUPS`` of the setting and
is laid over them, so that what belongs to a deploy, credentials above all, stays in the
settings, and what an operator changes is published (P2).
"""

from __future__ import annotations

import copy
import json
import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from sharded_orm.exceptions import InvalidTopology
from sharded_orm.topology.model import ShardRange

FORMAT = 1
# What an entry of RANGES means where it does not say so.
_RANGE_DEFAULTS = {
    one.name: one.default for one in fields(ShardRange) if one.default is not MISSING
}
# Entries of RANGES by the shards they are about, without what goes without saying.
_Ranges = dict[str, dict[str, Any]]
# Settings of a driver are three or four deep. What is much deeper is a mistake, and would end
# whatever walks through it.
_MAX_DEPTH = 32
_KEYS = {"format", "version", "nodes", "groups"}
# Of a node and, at any depth, of its OPTIONS: what an account is known by.
_SECRET = re.compile(
    r"user(name)?|operator|pass(w(or)?d|phrase)?|pwd|.*(password|secret|token|credential).*",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Document:
    """One version of what a source publishes. Its parts are never changed in place.

    :param version: counts up by every change; 0 for the settings themselves.
    :param nodes: node -> keys as in ``SHARDED_ORM["NODES"]``, a part of them or all.
    :param groups: group -> keys as in ``SHARDED_ORM["GROUPS"]``, a part of them or all.
    """

    version: int
    # Not in repr(): where credentials are allowed, they are in here.
    nodes: Mapping[str, Mapping[str, Any]] = field(repr=False)
    groups: Mapping[str, Mapping[str, Any]] = field(repr=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Document:
        """Read what :meth:`to_json` wrote, or a person.

        :raises InvalidTopology: it is no JSON, or no document; lists all that is wrong.
        """
        twice: list[str] = []

        def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            made = dict(pairs)
            if len(made) < len(pairs):
                times = Counter(key for key, _ in pairs)
                twice.extend(f"key {key!r} stands twice" for key in made if times[key] > 1)
            return made

        try:
            content = json.loads(text, object_pairs_hook=build, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as exc:
            raise InvalidTopology([f"it is not JSON: {exc}"]) from exc
        if twice:
            raise InvalidTopology(twice)
        return cls.from_content(content)

    @classmethod
    def from_file(cls, path: Path) -> Document:
        """Read a file: TOML if it ends in ``.toml``, else JSON.

        :raises InvalidTopology: it holds no document.
        :raises OSError: it cannot be read.
        """
        raw = path.read_bytes()
        if path.suffix != ".toml":
            return cls.from_json(raw)
        try:
            content = tomllib.loads(raw.decode())
        except (ValueError, RecursionError) as exc:
            raise InvalidTopology([f"it is not TOML: {exc}"]) from exc
        return cls.from_content(content)

    @classmethod
    def from_content(cls, content: Any) -> Document:
        """The document with these keys and values; takes a copy.

        :raises InvalidTopology: it lists all that is wrong with its outer shape.
        """
        if not isinstance(content, Mapping):
            raise InvalidTopology([f"it must be an object, not {type(content).__name__}"])
        # Before anything else, which would stumble over it.
        if (problem := _unfit(content)) is not None:
            raise InvalidTopology([problem])
        found = [
            f"unknown key {key!r}; valid keys are {sorted(_KEYS)!r}"
            for key in content
            if key not in _KEYS
        ]
        if content.get("format") != FORMAT or isinstance(content.get("format"), bool):
            found.append(f"format must be {FORMAT}, not {content.get('format')!r}")
        version = content.get("version")
        if not isinstance(version, int) or isinstance(version, bool) or version < 0:
            found.append(f"version must be a number that counts up, not {version!r}")
        parts: dict[str, dict[str, Any]] = {}
        for key in ("nodes", "groups"):
            part = content.get(key, {})
            if not isinstance(part, Mapping):
                found.append(f"{key} must be an object, not {type(part).__name__}")
                continue
            parts[key] = copy.deepcopy(dict(part))
            found += [
                f"{key[:-1]} {name!r} must be an object, not {type(one).__name__}"
                for name, one in part.items()
                if not isinstance(one, Mapping)
            ]
        if found or not isinstance(version, int):
            raise InvalidTopology(found)
        return cls(version, parts["nodes"], parts["groups"])

    def content(self) -> dict[str, Any]:
        """A copy of everything, to be edited and given to :meth:`from_content`."""
        return {
            "format": FORMAT,
            "version": self.version,
            "nodes": copy.deepcopy(dict(self.nodes)),
            "groups": copy.deepcopy(dict(self.groups)),
        }

    def to_json(self) -> str:
        """For people and for files; the same document gives the same text.

        :raises TypeError: a value has no form in JSON.
        """
        return json.dumps(self.content(), indent=2, sort_keys=True, ensure_ascii=False) + "\n"

    def at_version(self, version: int) -> Document:
        """The same content as another version."""
        return replace(self, version=version)

    def same_content(self, other: Document) -> bool:
        """Whether both mean the same, whatever their versions: there are no :meth:`differences`."""
        return bool(
            plain(self.nodes) == plain(other.nodes)
            and _effective(self.groups) == _effective(other.groups)
        )

    def over(self, setting: Mapping[str, Any]) -> dict[str, Any]:
        """``SHARDED_ORM`` with this document laid over its ``NODES`` and ``GROUPS``."""
        return {
            **setting,
            "NODES": merged(setting.get("NODES", {}), self.nodes),
            "GROUPS": merged(setting.get("GROUPS", {}), self.groups),
        }

    def credentials(self) -> list[str]:
        """Problems: the places that hold what an account is known by. No values."""
        return [
            f"node {name!r}: {path} does not belong into a topology document; keep credentials in"
            " NODES or NODE_DEFAULTS of the settings, or set the option CREDENTIALS of the source"
            for name, node in self.nodes.items()
            for path in _secret_paths(node)
        ]

    def without_credentials(self) -> Document:
        """The same without what :meth:`credentials` lists, and without what JSON cannot hold."""
        return replace(self, nodes=_public(self.nodes), groups=_public(self.groups))

    def differences(self, other: Document) -> list[str]:
        """What changes from this document to ``other``, in sentences without secrets."""
        return [
            *_changes("node", self.nodes, other.nodes),
            *_changes("group", self.groups, other.groups),
        ]


def merged(under: Any, over: Any) -> Any:
    """``over`` laid over ``under``: mappings key by key at any depth, anything else replaces."""
    if not isinstance(under, Mapping) or not isinstance(over, Mapping):
        return over
    return {
        **under,
        **{
            key: merged(under[key], value) if key in under else value for key, value in over.items()
        },
    }


def plain(value: Any) -> Any:
    """As JSON would give it back: lists for tuples, dicts for other mappings."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def _unfit(value: Any, path: str = "", depth: int = 0) -> str | None:
    """Why no process could walk through ``value``, or write it down; None if each can.

    :param path: where it is. The value itself may be a credential, and is not shown.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return f"it holds text that UTF-8 cannot encode, at {path}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"it holds {value!r}, which is no number in JSON, at {path}"
    parts: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        parts = [
            (f"{path}[{key!r}]" if path else key if key in _KEYS else repr(key), key)
            for key in value
        ]
        parts += [(where, value[key]) for where, key in parts]
    elif isinstance(value, (list, tuple)):
        parts = [(f"{path}[{number}]", part) for number, part in enumerate(value)]
    if parts and depth >= _MAX_DEPTH:
        return f"it is nested more than {_MAX_DEPTH} deep"
    return next((found for where, part in parts if (found := _unfit(part, where, depth + 1))), None)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _secret_paths(node: Any, above: str = "") -> Iterator[str]:
    if not isinstance(node, Mapping):
        return
    for key, value in node.items():
        path = f"{above}[{key!r}]" if above else str(key)
        if isinstance(key, str) and _SECRET.fullmatch(key):
            yield path
        else:
            yield from _secret_paths(value, path)


def _public(value: Any) -> Any:
    if isinstance(value, Mapping):
        shown = {
            key: _public(item)
            for key, item in value.items()
            if isinstance(key, str) and not _SECRET.fullmatch(key)
        }
        return {key: item for key, item in shown.items() if item is not _UNFIT}
    if isinstance(value, (list, tuple)):
        items = [_public(item) for item in value]
        return _UNFIT if _UNFIT in items else items
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    # A folder may be a Path; a converter or a TLS context stays where it is.
    return str(value) if hasattr(value, "__fspath__") else _UNFIT


_UNFIT: Any = object()


# ##### Differences #####


def _effective(groups: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Groups so that what means the same is the same: ranges by their shards, no default values."""
    found = {}
    for name, group in groups.items():
        made = found[name] = plain(group)
        if "RANGES" in group and (ranges := _by_span(made["RANGES"])) is not None:
            made["RANGES"] = ranges
    return found


def _by_span(ranges: Any) -> _Ranges | None:
    """The entries by their shards, without what they say of them and without default values.

    None for what are no ranges, or not each with shards of its own.
    """
    if not isinstance(ranges, list) or not all(isinstance(entry, dict) for entry in ranges):
        return None
    found = {
        str(entry.get("range")): {
            key: value
            for key, value in entry.items()
            if key != "range" and not (key in _RANGE_DEFAULTS and value == _RANGE_DEFAULTS[key])
        }
        for entry in ranges
    }
    return found if len(found) == len(ranges) else None


def _changes(kind: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted({*before, *after}):
        where = f"{kind} {name!r}"
        if name not in before:
            yield f"{where}: new"
            yield from _key_changes(where, {}, after[name])
        elif name not in after:
            yield f"{where}: gone"
        else:
            yield from _key_changes(where, before[name], after[name])


def _key_changes(where: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted({*before, *after}):
        old, new = plain(before.get(key)), plain(after.get(key))
        # None takes the place of what the settings have: it is not the same as nothing.
        same = (key in before) == (key in after)
        spans = new_spans = None
        if key == "RANGES":
            spans = _by_span(old if key in before else [])
            new_spans = _by_span(new if key in after else [])
        if spans is not None and new_spans is not None:
            changes = list(_range_changes(where, spans, new_spans))
            yield from changes
            if changes or same:
                continue
        elif same and old == new:
            continue
        if _SECRET.fullmatch(key) or any(_secret_paths(old)) or any(_secret_paths(new)):
            yield f"{where}: {key} changes"
        elif key not in before:
            yield f"{where}: {key} is {new!r}"
        elif key not in after:
            yield f"{where}: {key} {old!r} goes"
        else:
            yield f"{where}: {key} {old!r} becomes {new!r}"


def _range_changes(where: str, before: _Ranges, after: _Ranges) -> Iterator[str]:
    for span in before:
        if span not in after:
            yield f"{where}: range {span} goes"
    for span, entry in after.items():
        if span not in before:
            told = ", ".join(
                f"{key} {value!r}" for key, value in entry.items() if not _SECRET.fullmatch(key)
            )
            yield f"{where}: range {span} is new: {told}"
            continue
        for key in sorted({*before[span], *entry}):
            if (change := _value_change(key, before[span], entry)) is not None:
                yield f"{where}: range {span}{change}"


def _value_change(key: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    if key in before and key in after and before[key] == after[key]:
        return None
    if _SECRET.fullmatch(key):
        return f": {key} changes"
    if key == "replica" and key not in before:
        return f" gets the replica {after[key]!r}"
    if key == "replica" and key not in after:
        return f" loses the replica {before[key]!r}"
    if key not in before and key not in _RANGE_DEFAULTS:
        return f": {key} is {after[key]!r}"
    if key not in after and key not in _RANGE_DEFAULTS:
        return f": {key} {before[key]!r} goes"
    old, new = (
        _number(entry[key]) if key in entry else f"{_number(_RANGE_DEFAULTS[key])} (the default)"
        for entry in (before, after)
    )
    return f": {key} {old} becomes {new}"


def _number(value: Any) -> str:
    """As a person writes it."""
    return repr(int(value) if isinstance(value, float) and value.is_integer() else value)
