"""Puts the names that reference pages explain into the index of the site.

A reference page explains a name in a heading or in the first column of a table, or, for the actions of a
command, at the beginning of a paragraph. Each of these places gets an entry in the index and an address
of its own. The pages stay plain Markdown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx.addnodes import index
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

#: What the names of a page are.
KINDS = {
    "reference/admin": "admin",
    "reference/checks": "system check",
    "reference/commands": "command",
    "reference/django-commands": "command of Django",
    "reference/exceptions": "exception",
    "reference/ids": "ids",
    "reference/models": "models",
    "reference/querysets": "querysets",
    "reference/settings": "setting",
    "reference/signals": "signal",
}
COMMANDS = "reference/commands"

_NAME = re.compile(r"-{0,2}\w[\w.<>-]*")


class IndexOfNames(SphinxTransform):
    """Adds the entries, before Sphinx collects those of a page."""

    default_priority = 700

    def apply(self, **kwargs: Any) -> None:
        kind = KINDS.get(self.env.docname)
        if kind is None:
            return
        for section in self.document.findall(nodes.section):
            title = section.next_node(nodes.title)
            for name in _names(title.children):
                self._add(section, title, f"{name} ({kind})", name)
            for child in section.children:
                for place, cell in _places(child):
                    for name in _names(cell.children):
                        # A word in capitals is an argument of a command.
                        if self.env.docname != COMMANDS or not name.isupper():
                            self._add(place, cell, *self._entry(name, title, kind))

    def _entry(self, name: str, title: nodes.Element, kind: str) -> tuple[str, str]:
        """Return the text of an entry, and the name from which its address is made."""
        heading = title.astext()
        if name.startswith("-"):
            return f"{name} (option of {heading})", f"{heading}{name}"
        if self.env.docname == COMMANDS:
            if any(title.findall(nodes.literal)):
                return f"{heading} {name} ({kind})", f"{heading}-{name}"
            return f"{name} ({kind})", name
        if any(title.findall(nodes.literal)) or title.parent.parent is self.document:
            return f"{name} ({kind})", name
        return f"{name} ({kind}: {heading})", name

    def _add(self, place: nodes.Element, before: nodes.Element, text: str, name: str) -> None:
        if not isinstance(place, nodes.section):
            number, address = 1, nodes.make_id(name)
            while address in self.document.ids:
                number, address = number + 1, f"{nodes.make_id(name)}-{number + 1}"
            place["ids"].append(address)
            self.document.note_explicit_target(place)
        entry = index(entries=[("single", text, place["ids"][-1], "", None)])
        before.insert(0, entry)


def _places(element: nodes.Node) -> Iterator[tuple[nodes.Element, nodes.Element]]:
    """Return where names may be explained: the element that gets the address, and the text."""
    if isinstance(element, nodes.table):
        for body in element.findall(nodes.tbody):
            for row in body.findall(nodes.row):
                cell = row.next_node(nodes.entry)
                if cell.children:
                    yield row, cell.children[0]
    elif isinstance(element, nodes.paragraph):
        children = [child for child in element.children if child.astext()]
        if children and isinstance(children[0], nodes.strong):
            yield from ((element, strong) for strong in element.findall(nodes.strong))


def _names(children: list[nodes.Node]) -> list[str]:
    """Return the names with which a text begins: code, with nothing but commas between."""
    names = []
    for child in children:
        if isinstance(child, nodes.literal):
            match = _NAME.match(child.astext())
            if match:
                names.append(match[0])
        elif child.astext().strip() not in ("", ","):
            break
    return names


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_transform(IndexOfNames)
    return {"parallel_read_safe": True}
