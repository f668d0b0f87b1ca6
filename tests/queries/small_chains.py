"""Small random chains of calls that might get each other's plans.

The chains of one example differ from the first one in one value, or in one part, such as the arguments of
``order_by()``. The values of a place may be confused: 1, True, "1", None, an expression, a list, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

from hypothesis import strategies as st

from tests.queries.chains import RANDOMS, Chain, Values, filled, keywords, one_of, weighted

_METHODS = (
    *[".filter({})"] * 8, *[".exclude({})"] * 3, ".filter(Q({}))", ".filter(~Q({}))", ".filter(Q({}) | Q(pk=1))",
    ".filter(Q(pk__gte=1), {})",
)  # fmt: skip
_STEPS = one_of(
    *[""] * 9, *[".order_by({})"] * 5, ".values({})", ".values_list({})", ".only({})", ".defer({})",
)  # fmt: skip
_PAGES = one_of("", "[<slice>]")
ENDS = (
    *["list({})"] * 4, *["{}.exists()"] * 3, *["{}.count()"] * 2, "{}.first()", "{}.get()", "list({}.filter(pk=1))",
    "list({}.using(<alias>))",
)  # fmt: skip


class Frame(NamedTuple):
    """Makes the parts of a chain, and joins them.

    :param parts: returns the parts, each with places for values.
    :param compared: the positions of the parts whose values are changed most.
    """

    parts: Callable[[Random], list[str]]
    joined: Callable[[Sequence[str]], str]
    compared: Sequence[int]


def small_chains(
    frame: Frame, values: Mapping[str, Values], names: Mapping[str, Any]
) -> st.SearchStrategy[list[Chain]]:
    """Two to eight chains that differ from the first in one value, or in one part.

    :param values: what may stand at each place. Values of any kind are left out, because most of
        them are errors.
    :param names: what the names in the parts mean.
    """
    known = {name: some._replace(others=()) for name, some in values.items()}

    def alike(pick: Random) -> list[Chain]:
        first = [filled(part, known, pick) for part in frame.parts(pick)]
        found = [first]
        places = [
            place
            for number, part in enumerate(first)
            for place in ((number, hole, name) for hole, name in enumerate(part.holes))
            for _ in range(3 if number in frame.compared else 1)
        ]
        if places:
            number, hole, name = pick.choice(places)
            part = first[number]
            for value in known[name].alternatives(pick, 2 + pick.randrange(4)):
                filling = [*part.values[:hole], value, *part.values[hole + 1 :]]
                found.append([*first[:number], part._replace(values=filling), *first[number + 1 :]])
        for _ in range(1 + pick.randrange(2)):
            # Without a part in this place, the other chain would rather have another shape anyway.
            number = pick.choice([number for number, part in enumerate(first) if part.form])
            other = filled(frame.parts(pick)[number], known, pick)
            found.append([*first[:number], other, *first[number + 1 :]])
        return [Chain(frame.joined(list(map(str, parts))), names) for parts in found]

    return RANDOMS.map(alike)


def frame_of_reads(
    starts: Sequence[str], names: Sequence[str], fields: Sequence[str], ends: Sequence[str] = ENDS
) -> Frame:
    """Return reads with one or two conditions, perhaps one more call and a slice, and one end.

    :param starts: querysets, most of which name the shard key.
    :param names: the names of conditions.
    :param fields: arguments of ``order_by()``, ``values()`` and so on.
    """
    keywords_of_call = weighted((3, keywords(names, 1)), (1, keywords(names, 2)))

    def parts(pick: Random) -> list[str]:
        found = [pick.choice(starts)]
        for is_called in (pick.randrange(8) > 0, pick.randrange(6) > 4):
            found += [pick.choice(_METHODS), keywords_of_call(pick)] if is_called else ["", ""]
        step = _STEPS(pick)
        found += [step, pick.choice(fields) if step else ""]
        return [*found, _PAGES(pick), pick.choice(ends)]

    return Frame(parts, _joined_read, compared=(2, 4))


def _joined_read(parts: Sequence[str]) -> str:
    start, method, condition, other_method, other_condition, step, fields, page, end = parts
    calls = (
        method.replace("{}", condition).replace(", )", ")"),
        other_method.replace("{}", other_condition).replace(", )", ")"),
        step.replace("{}", fields),
    )
    return end.replace("{}", f"{start}{''.join(calls)}{page}")
