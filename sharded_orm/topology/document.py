"""The topology document: the part of the topology that may change while processes run.

This module uses neither Django nor a database driver. A document has the structure of ``NODES`` and
``GROUPS`` in the setting ``SHARDED_ORM``, and overrides their values. A topology source, such as
ZooKeeper, publishes it to all processes (Pinterest, P2, in docs/explanation/designs.md). Values
that change only with a deployment, above all credentials, stay in the settings.
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
# The default values of the optional keys in an entry of RANGES, the list of a group's ranges of
# shards.
_RANGE_DEFAULTS = {
    part.name: part.default for part in fields(ShardRange) if part.default is not MISSING
}
# The type of RANGES in a form that can be compared, for example {"[0, 511]": {"primary": "db1"}}.
# It maps the shards of each entry, as a text, to the other items of the entry. Items that have the
# default value are left out.
_Ranges = dict[str, dict[str, Any]]
# The maximum depth of a document. Correct documents are nested only a few levels deep. A much
# deeper document is a mistake, and recursive functions would fail on it.
_MAX_DEPTH = 32
_KEYS = {"format", "version", "nodes", "groups"}
# The names of the keys that contain credentials, in a node's settings and at any depth of its
# OPTIONS.
_SECRET = re.compile(
    r"user(name)?|operator|pass(w(or)?d|phrase)?|pwd|.*(password|secret|token|credential).*",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Document:
    """A version of the topology document. A document and its parts are never changed in place.

    :param version: a number that grows with every change; 0 for the document made from the
        settings.
    :param nodes: maps the name of each node (database server) to its settings. A setting that is
        missing here is taken from ``SHARDED_ORM["NODES"]``.
    :param groups: maps the name of each shard group to its settings. A setting that is missing here
        is taken from ``SHARDED_ORM["GROUPS"]``.
    """

    version: int
    # Leave nodes and groups out of repr(), because a source may allow credentials in them.
    nodes: Mapping[str, Mapping[str, Any]] = field(repr=False)
    groups: Mapping[str, Mapping[str, Any]] = field(repr=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Document:
        """Return the document that the JSON text ``text`` contains.

        :raises InvalidTopology: ``text`` is not JSON, or not a document; the message lists all
            problems.
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
        """Return the document that a file contains.

        The file is read as TOML if its name ends in ``.toml``, and otherwise as JSON.

        :raises InvalidTopology: the file does not contain a document.
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
        """Return a document with a copy of ``content``, a mapping of values that JSON can represent.

        Only the outer structure is checked, not the settings of nodes and groups.

        :raises InvalidTopology: the structure is wrong; the message lists all problems.
        """
        if not isinstance(content, Mapping):
            raise InvalidTopology([f"it must be an object, not {type(content).__name__}"])
        # Make this check first, because the later steps could fail on content that is nested too
        # deep or that JSON cannot represent.
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
        """Return a copy as a dict, which can be edited and passed to :meth:`from_content`."""
        return {
            "format": FORMAT,
            "version": self.version,
            "nodes": copy.deepcopy(dict(self.nodes)),
            "groups": copy.deepcopy(dict(self.groups)),
        }

    def to_json(self) -> str:
        """Return the document as JSON, for people and files. Equal documents have the same text.

        :raises TypeError: the document contains a value that JSON cannot represent, such as a date.
        """
        return json.dumps(self.content(), indent=2, sort_keys=True, ensure_ascii=False) + "\n"

    def at_version(self, version: int) -> Document:
        """Return a copy of this document that has the version ``version``."""
        return replace(self, version=version)

    def same_content(self, other: Document) -> bool:
        """Whether this document and ``other`` have the same meaning, apart from their versions.

        If so, :meth:`differences` returns no changes.
        """
        return bool(
            plain(self.nodes) == plain(other.nodes)
            and _effective(self.groups) == _effective(other.groups)
        )

    def over(self, setting: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of ``setting`` (the ``SHARDED_ORM`` dict), overridden by this document's values.

        The copy differs only in ``NODES`` and ``GROUPS``. Mappings in them are merged at any depth.
        """
        return {
            **setting,
            "NODES": merged(setting.get("NODES", {}), self.nodes),
            "GROUPS": merged(setting.get("GROUPS", {}), self.groups),
        }

    def credentials(self) -> list[str]:
        """Return one sentence for each credential in the settings of nodes.

        The sentence contains the key of the credential, but not its value.
        """
        return [
            f"node {name!r}: {path} does not belong into a topology document; keep credentials in"
            " NODES or NODE_DEFAULTS of the settings, or set the option CREDENTIALS of the source"
            for name, node in self.nodes.items()
            for path in _secret_paths(node)
        ]

    def without_credentials(self) -> Document:
        """Return the document without credentials, and without values that JSON cannot represent."""
        return replace(self, nodes=_public(self.nodes), groups=_public(self.groups))

    def differences(self, other: Document) -> list[str]:
        """Return the changes from this document to ``other``, as sentences without credentials."""
        return [
            *_changes("node", self.nodes, other.nodes),
            *_changes("group", self.groups, other.groups),
        ]


def merged(under: Any, over: Any) -> Any:
    """Return ``under``, overridden by the values of ``over``.

    Two mappings are merged key by key, at any depth. In all other cases the value in ``over`` replaces
    the value in ``under``.
    """
    if not isinstance(under, Mapping) or not isinstance(over, Mapping):
        return over
    return {
        **under,
        **{
            key: merged(under[key], value) if key in under else value for key, value in over.items()
        },
    }


def plain(value: Any) -> Any:
    """Return ``value`` as it would be after it was written to JSON and read back.

    Tuples become lists, and mappings become dicts.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def _problem_in(value: Any, path: str = "", depth: int = 0) -> str | None:
    """Return a sentence that says why ``value`` cannot be in a document; None if it can.

    A value is refused if it is nested too deep, or if it contains text or a number that JSON cannot
    represent. The sentence contains no text of ``value``, which may be a credential.

    :param path: the keys that lead to ``value``, for the sentence.
    :param depth: the number of mappings and lists around ``value``.
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
    # JSON cannot represent a value of this type. Turn a path into text. Leave out any other value,
    # such as a converter or a TLS context.
    return str(value) if hasattr(value, "__fspath__") else _UNWRITABLE


_UNWRITABLE: Any = object()


# ##### Differences #####


def _effective(groups: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return ``groups`` in a normal form, so that two settings with the same meaning compare equal.

    In the normal form, RANGES is not a list but the dict that :func:`_by_span` returns.
    """
    effective = {}
    for name, group in groups.items():
        comparable = effective[name] = plain(group)
        if "RANGES" in group and (ranges := _by_span(comparable["RANGES"])) is not None:
            comparable["RANGES"] = ranges
    return effective


def _by_span(ranges: Any) -> _Ranges | None:
    """Return ``ranges``, the list RANGES of a group, as a dict with one item for each entry.

    The dict maps the shards of the entry, as a text such as "[0, 511]", to the other items of the
    entry. Items that have the default value are left out. So two lists are equal in this form even
    if their order differs, or if only one of them states a default value. Return None if ``ranges``
    is not a list of dicts, or if two entries have the same shards.
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
        # A key whose value is None counts as different from a missing key, because None overrides
        # the setting.
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
    """Return a number as text for people, without decimals if it is whole: ``2`` for ``2.0``."""
    return repr(int(value) if isinstance(value, float) and value.is_integer() else value)
