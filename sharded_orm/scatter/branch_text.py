"""Makes the SELECT for one shard from the text of a template.

In the template, marks stand for the shard's schema, the shard's index, and the keys to read.
"""

from __future__ import annotations

from functools import lru_cache

from sharded_orm.scatter.facade import PK_MARK, SCHEMA_MARK, SHARD_MARK

# The number of templates whose pieces are remembered: those that were used last.
_TEMPLATES = 8
# The number of SELECTs (each for one shard) whose texts are remembered: those that were used last.
_BRANCHES = 2048


@lru_cache(maxsize=_TEMPLATES)
def pieces_of(sql: str) -> tuple[list[str], list[str], list[str]] | None:
    """Split a template's SQL at its marks, and return the three parts of its text.

    The first part ends at the mark for the shard's index, and the second part at the mark for the
    keys. Each part is a list of texts. To get the SQL, join these texts by the name of the shard's
    schema. Return None if the SQL needs parameters.

    :param sql: the SQL of a template without parameters.
    """
    start, rest = sql.split(SHARD_MARK)
    middle, end = rest.split(PK_MARK)
    try:
        # In a statement with parameters, the driver turns "%%" into "%". The text that is made of
        # these pieces is sent without parameters, so do the same here.
        start, middle, end = (part % () for part in (start, middle, end))
    except (TypeError, ValueError):
        return None
    return start.split(SCHEMA_MARK), middle.split(SCHEMA_MARK), end.split(SCHEMA_MARK)


@lru_cache(maxsize=_BRANCHES)
def branch_ends(sql: str, mark: str, schema: str, index: int) -> tuple[str, str] | None:
    """Return a pair for the SELECT for one shard: its SQL before the keys, and its SQL after them.

    The first text begins with a parenthesis, and the second ends with one. Return None if the SQL
    needs parameters in addition to the keys. The arguments are those of :func:`branch_sql`.
    """
    pieces = pieces_of(sql)
    if pieces is None:
        return None
    start, middle, end = pieces
    quoted = quoted_schema(schema, mark)
    return f"({quoted.join(start)}{index}{quoted.join(middle)}", f"{quoted.join(end)})"


def quoted_schema(schema: str, mark: str) -> str:
    """Return the name of a schema in quotation marks."""
    return f"{mark}{schema.replace(mark, mark * 2)}{mark}"


def branch_sql(sql: str, mark: str, schema: str, index: int) -> str:
    """Return the SELECT for one shard, in parentheses.

    :param sql: the SQL of a template.
    :param mark: the database's quotation mark for names.
    :param index: the shard's index in the plan.
    """
    quoted = quoted_schema(schema, mark).replace("%", "%%")
    return f"({sql.replace(SCHEMA_MARK, quoted).replace(SHARD_MARK, str(index))})"
