"""Runs examples with ``>>>`` inside the project of the working directory.

``python shell.py SETTINGS`` reads examples from standard input as one interactive session. It exits
with 1 if the output of an example differs. It needs nothing else of the tests.
"""

from __future__ import annotations

import doctest
import os
import re
import sys

# The directory draws shards at random; a page shows one possible outcome.
_RANDOM = [
    (re.compile(r"\b(photos_)\d{5}\b(?! …|, photos_|\))"), r"\1NNNNN"),
    (re.compile(r"1 shard \(photos_\d{5}\) on node_\d"), "1 shard (photos_NNNNN) on node_N"),
]


class Checker(doctest.OutputChecker):
    """Compares output, except for its random parts."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return super().check_output(_settled(want), _settled(got), optionflags)


def _settled(text: str) -> str:
    for pattern, replacement in _RANDOM:
        text = pattern.sub(replacement, text)
    return text


def main(settings: str, text: str) -> int:
    os.environ["DJANGO_SETTINGS_MODULE"] = settings
    import django

    django.setup()
    test = doctest.DocTestParser().get_doctest(text, {}, "tutorial", None, 0)
    runner = doctest.DocTestRunner(checker=Checker(), verbose=False, optionflags=doctest.ELLIPSIS)
    runner.run(test)
    return 1 if runner.summarize(verbose=False).failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.stdin.read()))
