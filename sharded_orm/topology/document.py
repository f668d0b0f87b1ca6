"""The topology document: the part of the topology that changes while processes run.

Pure: no Django, no drivers. A document has the shape of ``NODES`` and ``GROUPS`` of the setting
and is laid over them. So everything that belongs to a deploy, above all credentials, stays in the
settings, and everything that an operator changes is published by a topology source (P2).
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
# The defaults of the keys of an entry of RANGES.
_RANGE_DEFAULTS = {
    part.name: part.default for part in fields(ShardRange) if part.default is not MISSING
}
# Shards of a range, as text -> the other keys of its entry, without default values.
_Ranges = dict[str, dict[str, Any]]
# The deepest nesting of a document. Settings of a driver nest three or four deep; anything much
# deeper is a mistake, and recursion would fail on it.
_MAX_DEPTH = 32
_KEYS = {"format", "version", "nodes", "groups"}
# Keys, of a node and at any depth of its OPTIONS, that hold credentials.
_SECRET = re.compile(
    r"user(name)?|operator|pass(w(or)?d|phrase)?|pwd|.*(password|secret|token|credential).*",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Document:
    """One version of the document that a source publishes. Its parts are never changed in place.

    :param version: grows with every change; 0 for the settings themselves.
    :param nodes: node -> some or all of the keys in ``SHARDED_ORM["NODES"]``.
    :param groups: group -> some or all of the keys in ``SHARDED_ORM["GROUPS"]``.
    """

    version: int
    # Not in repr(): a source may allow credentials in here.
    nodes: Mapping[str, Mapping[str, Any]] = field(repr=False)
    groups: Mapping[str, Mapping[str, Any]] = field(repr=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Document:
        """Read JSON, written by :meth:`to_json` or by a person.

        :raises InvalidTopology: ``text`` is no JSON, or no document; lists all that is wrong.
        """
        twice: list[str] = []

        def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            content = dict(pairs)
            if len(content) < len(pairs):
                counts = Counter(key for key, _ in pairs)
                twice.extend(f"key {key!r} stands twice" for key in content if counts[key] > 1)
            return content

        try:
            content = json.loads(text, object_pairs_hook=build, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as exc:
            raise InvalidTopology([f"it is not JSON: {exc}"]) from exc
        if twice:
            raise InvalidTopology(twice)
        return cls.from_content(content)

    @classmethod
    def from_file(cls, path: Path) -> Document:
        """Read a file: TOML if its name ends in ``.toml``, else JSON.

        :raises InvalidTopology: the file holds no document.
        :raises OSError: the file cannot be read.
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
        """The document with a copy of these keys and values.

        :raises InvalidTopology: the outer shape is wrong; lists all problems.
        """
        if not isinstance(content, Mapping):
            raise InvalidTopology([f"it must be an object, not {type(content).__name__}"])
        # This check comes first: the others could not handle such a value.
        if (problem := _problem_in(content)) is not None:
            raise InvalidTopology([problem])
        problems = [
            f"unknown key {key!r}; valid keys are {sorted(_KEYS)!r}"
            for key in content
            if key not in _KEYS
        ]
        if content.get("format") != FORMAT or isinstance(content.get("format"), bool):
            problems.append(f"format must be {FORMAT}, not {content.get('format')!r}")
        version = content.get("version")
        if not isinstance(version, int) or isinstance(version, bool) or version < 0:
            problems.append(f"version must be a number that counts up, not {version!r}")
        parts: dict[str, dict[str, Any]] = {}
        for key in ("nodes", "groups"):
            part = content.get(key, {})
            if not isinstance(part, Mapping):
                problems.append(f"{key} must be an object, not {type(part).__name__}")
                continue
            parts[key] = copy.deepcopy(dict(part))
            problems += [
                f"{key[:-1]} {name!r} must be an object, not {type(entry).__name__}"
                for name, entry in part.items()
                if not isinstance(entry, Mapping)
            ]
        if problems or not isinstance(version, int):
            raise InvalidTopology(problems)
        return cls(version, parts["nodes"], parts["groups"])

    def content(self) -> dict[str, Any]:
        """A copy of all keys and values, which may be edited and passed to :meth:`from_content`."""
        return {
            "format": FORMAT,
            "version": self.version,
            "nodes": copy.deepcopy(dict(self.nodes)),
            "groups": copy.deepcopy(dict(self.groups)),
        }

    def to_json(self) -> str:
        """The document as JSON, for people and files; equal documents give the same text.

        :raises TypeError: JSON cannot hold a value.
        """
        return json.dumps(self.content(), indent=2, sort_keys=True, ensure_ascii=False) + "\n"

    def at_version(self, version: int) -> Document:
        """The same content under another version."""
        return replace(self, version=version)

    def same_content(self, other: Document) -> bool:
        """Whether both mean the same, apart from their versions: there are no :meth:`differences`."""
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
        """Problems, in sentences: the places that hold credentials. Values are not shown."""
        return [
            f"node {name!r}: {path} does not belong into a topology document; keep credentials in"
            " NODES or NODE_DEFAULTS of the settings, or set the option CREDENTIALS of the source"
            for name, node in self.nodes.items()
            for path in _secret_paths(node)
        ]

    def without_credentials(self) -> Document:
        """The same without the values that :meth:`credentials` lists, and without those that JSON cannot hold."""
        return replace(self, nodes=_public(self.nodes), groups=_public(self.groups))

    def differences(self, other: Document) -> list[str]:
        """The changes from this document to ``other``, in sentences without secrets."""
        return [
            *_changes("node", self.nodes, other.nodes),
            *_changes("group", self.groups, other.groups),
        ]


def merged(under: Any, over: Any) -> Any:
    """``over`` laid over ``under``: mappings are merged at any depth, any other value replaces."""
    if not isinstance(under, Mapping) or not isinstance(over, Mapping):
        return over
    return {
        **under,
        **{
            key: merged(under[key], value) if key in under else value for key, value in over.items()
        },
    }


def plain(value: Any) -> Any:
    """``value`` as JSON would return it: lists for tuples, dicts for other mappings."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def _problem_in(value: Any, path: str = "", depth: int = 0) -> str | None:
    """Why ``value`` cannot be traversed or written as JSON, in a sentence; None if it can.

    :param path: the keys that lead to ``value``, which is not shown: it may be a credential.
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
        parts += [(key_path, value[key]) for key_path, key in parts]
    elif isinstance(value, (list, tuple)):
        parts = [(f"{path}[{number}]", part) for number, part in enumerate(value)]
    if parts and depth >= _MAX_DEPTH:
        return f"it is nested more than {_MAX_DEPTH} deep"
    problems = (_problem_in(part, part_path, depth + 1) for part_path, part in parts)
    return next((problem for problem in problems if problem), None)


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
        return {key: item for key, item in shown.items() if item is not _UNWRITABLE}
    if isinstance(value, (list, tuple)):
        items = [_public(item) for item in value]
        return _UNWRITABLE if _UNWRITABLE in items else items
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    # A folder may be a Path. A converter or a TLS context cannot be written as JSON.
    return str(value) if hasattr(value, "__fspath__") else _UNWRITABLE


_UNWRITABLE: Any = object()


# ##### Differences #####


def _effective(groups: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Groups in a form that is equal if they mean the same: ranges by shards, no default values."""
    effective = {}
    for name, group in groups.items():
        comparable = effective[name] = plain(group)
        if "RANGES" in group and (ranges := _by_span(comparable["RANGES"])) is not None:
            comparable["RANGES"] = ranges
    return effective


def _by_span(ranges: Any) -> _Ranges | None:
    """Shards of a range, as text -> the other keys of its entry, without default values.

    None if ``ranges`` is no list of dicts, or two entries have the same shards.
    """
    if not isinstance(ranges, list) or not all(isinstance(entry, dict) for entry in ranges):
        return None
    by_span = {
        str(entry.get("range")): {
            key: value
            for key, value in entry.items()
            if key != "range" and not (key in _RANGE_DEFAULTS and value == _RANGE_DEFAULTS[key])
        }
        for entry in ranges
    }
    return by_span if len(by_span) == len(ranges) else None


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
        # None replaces the value of the settings, so it differs from a missing key.
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
            values = ", ".join(
                f"{key} {value!r}" for key, value in entry.items() if not _SECRET.fullmatch(key)
            )
            yield f"{where}: range {span} is new: {values}"
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
    """A number as a person writes it: ``2`` for ``2.0``."""
    return repr(int(value) if isinstance(value, float) and value.is_integer() else value)
