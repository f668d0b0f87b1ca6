"""Random chains of calls, written as Python, for tests that compare reads and writes with plans and without.

A failure is shrunk to a short chain, which is printed as a person would write it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from random import Random
from typing import Any, NamedTuple, TypeAlias

import pytest
from django.db import connections, reset_queries
from django.test.utils import CaptureQueriesContext
from hypothesis import HealthCheck, currently_in_test_context, event, settings
from hypothesis import strategies as st

from sharded_orm.models.plans import inserts, saves
from sharded_orm.models.querysets import first_recordings
from sharded_orm.models.querysets.plans import plan_uses, without_plans
from tests.queries.twins import GROUP, comparable_value, rolled_back

#: A place for a value: the name of the values that fit.
_HOLE = re.compile(r"<(\w+)>")
#: Long runs have as many times more chains.
_LONG = 30

# All choices are made by this generator. Hypothesis repeats parts that it has drawn from strategies with
# others, and would make a few chains many times.
RANDOMS = st.randoms(use_true_random=False)

#: Makes an expression with places for values, by random choices. The first of all choices is the simplest.
Form: TypeAlias = Callable[[Random], str]
Outcome = tuple[Any, ...]


class Chain:
    """Calls as the text of one expression. Each run makes all values anew.

    :param source: the expression.
    :param names: what its names mean.
    """

    def __init__(self, source: str, names: Mapping[str, Any]) -> None:
        self.source = source
        self._code = compile(source, "<chain>", "eval")
        self._names = names

    def __call__(self) -> Any:
        return eval(self._code, {**self._names})

    def __repr__(self) -> str:
        return self.source


def chains(
    form: Form, values: Mapping[str, Values], names: Mapping[str, Any]
) -> st.SearchStrategy[list[Chain]]:
    """Up to four chains that differ only in values, so that one might get the plan of another.

    :param form: makes expressions with places for values, such as ``Item.objects.get(pk=<pk>)``.
    :param values: what may stand at each of these places.
    :param names: what the names in these expressions mean.
    """

    def alike(pick: Random) -> list[Chain]:
        first = filled(form(pick), values, pick)
        found = [first]
        holes = [values[name] for name in first.holes]
        for _ in range(pick.randrange(4) if holes else 0):
            filling = [
                hole.alternative(pick) if pick.randrange(2) else value
                for hole, value in zip(holes, first.values, strict=True)
            ]
            found.append(first._replace(values=filling))
        return [Chain(str(one), names) for one in found]

    return RANDOMS.map(alike)


class FilledForm(NamedTuple):
    """A form, and the values at its places."""

    form: str
    values: list[str]

    @property
    def holes(self) -> list[str]:
        return _HOLE.findall(self.form)

    def __str__(self) -> str:
        parts = _HOLE.split(self.form)
        parts[1::2] = self.values
        return "".join(parts)


def filled(form: str, values: Mapping[str, Values], pick: Random) -> FilledForm:
    """Put values, most of which fit, in the places of a form."""
    return FilledForm(form, [values[name].first(pick) for name in _HOLE.findall(form)])


# -- Forms


def one_of(*forms: str) -> Form:
    return lambda pick: pick.choice(forms)


def weighted(*choices: tuple[int, Form]) -> Form:
    """One of the forms, each as often as its number says."""
    several = [form for number, form in choices for _ in range(number)]
    return lambda pick: pick.choice(several)(pick)


def formatted(template: Form | str, *forms: Form) -> Form:
    """A template such as ``({} | {})`` with forms at its places."""

    def text(pick: Random) -> str:
        known = template if isinstance(template, str) else template(pick)
        return known.format(*(form(pick) for form in forms))

    return text


def keywords(names: Sequence[str], count: int = 2) -> Form:
    """Up to ``count`` keyword arguments, with places for their values."""

    def text(pick: Random) -> str:
        some = dict.fromkeys(pick.choice(names) for _ in range(1 + pick.randrange(count)))
        return ", ".join(f"{name}=<{name}>" for name in some)

    return text


class Values(NamedTuple):
    """The expressions that may stand at one place.

    :param fitting: values that have a plan in most queries, the simplest first.
    :param similar: values that might be taken for them, but are of another kind.
    :param others: values of any kind.
    """

    fitting: Sequence[str]
    similar: Sequence[str] = ()
    others: Sequence[str] = ()

    def first(self, pick: Random) -> str:
        return self._drawn(pick, 8, 1, 1)

    def alternative(self, pick: Random) -> str:
        """A value that might get the plan of another one."""
        return self._drawn(pick, 1, 5, 1)

    def alternatives(self, pick: Random, count: int) -> list[str]:
        """Up to ``count`` different ones."""
        return list(dict.fromkeys(self.alternative(pick) for _ in range(count)))

    def _drawn(self, pick: Random, *weights: int) -> str:
        known = [some for n, some in zip(weights, self, strict=True) if some for _ in range(n)]
        return pick.choice(pick.choice(known))


def as_many(examples: int, config: pytest.Config) -> settings:
    """The same examples in each routine run, and many others in each long run."""
    is_long = config.getoption("--long")
    return settings(
        max_examples=examples * _LONG if is_long else examples,
        derandomize=not is_long,
        suppress_health_check=list(HealthCheck),
    )


def outcome(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Return the result or the error of ``call``, and the statements that it has sent."""
    value: Any
    # PostgreSQL runs nothing in a transaction after an error.
    errors_end = connections["default"].vendor == "postgresql"
    with ExitStack() as stack:
        stack.enter_context(rolled_back() if errors_end else nullcontext())
        sent = [
            stack.enter_context(CaptureQueriesContext(connections[alias]))
            for alias in (GROUP, "default")
        ]
        try:
            value = comparable_value(call())
        except Exception as exc:
            value = (type(exc), str(exc))
    statements = [str(query["sql"]) for queries in sent for query in queries]
    # A scatter asks the nodes at the same time. The names of cursors are counted. Bytes for a UUID
    # become the text of a memoryview, with its address.
    return value, sorted(
        re.sub(r'"_django_curs_\w+"|(?<=<memory at )0x[0-9a-f]+', "", text)
        for text in statements
        # After an error, we look whether shards are moved, from a time on.
        if "SAVEPOINT" not in text and "sharded_orm_run" not in text
    )


def shown_outcome(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Return the same with the result as text, in which 1 and True differ and NaN is equal to itself."""
    return outcome(lambda: repr(comparable_value(call())))


class Comparison:
    """Runs chains once without plans and then again and again with them, and expects the same outcomes.

    :param plainly: in its block, chains run without what is compared. Default: without plans.
    """

    def __init__(
        self,
        outcome: Callable[[Chain], Outcome] = shown_outcome,
        plainly: Callable[[], AbstractContextManager[None]] = without_plans,
    ) -> None:
        self._outcome = outcome
        self._plainly = plainly
        #: How many chains did what.
        self.counts: Counter[str] = Counter()

    def __call__(self, chains: list[Chain], uses: Callable[[], int] = lambda: 0) -> None:
        """Compare chains that differ in values.

        :param uses: returns how often plans, or what is compared, were used until now.
        """
        # The log of the statements has a limit, of which Django warns.
        reset_queries()
        # So that a failure does not depend on the chains before, and can be shrunk.
        for part in (first_recordings, saves, inserts):
            part.forget()
        with self._plainly():
            expected = [self._outcome(chain) for chain in chains]
        for number, (chain, known) in enumerate(zip(chains, expected, strict=True)):
            before = uses()
            # The second run makes a plan of its own, the third one uses it.
            for run in range(3 if number else 4):
                found = self._outcome(chain)
                assert found == known, f"run {run} of {chain}: {found}, expected: {known}"
            self._count("chains")
            self._count("errors" if is_error(known[0]) else "results")
            if uses() > before:
                self._count("used")

    def _count(self, what: str) -> None:
        self.counts[what] += 1
        if currently_in_test_context():
            event(what)

    def share(self, what: str) -> float:
        """Return the share of the chains that did so."""
        return self.counts[what] / self.counts["chains"]


def count_of_uses() -> int:
    """Return how often plans of reads were used until now."""
    return sum(use.uses or 0 for use in plan_uses())


def is_error(value: Any) -> bool:
    return isinstance(value, tuple) and isinstance(value[0], type)
