"""The queries that read all objects of a schema from PostgreSQL's catalogs.

On a server with thousands of schemas, the catalogs have millions of rows, and no index by schema.
So the first query uses the index on dependencies: each object depends on its schema. The second
query reads these objects by their ids. The time for both does not grow with the number of schemas
on the server.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from sharded_orm.backends.snapshot import OWN_PREFIX


class CatalogCursor(Protocol):
    """The methods of a cursor that this package calls. Both Django's cursor and the cursor of a
    node have them.
    """

    def execute(self, sql: str, params: Any = None, /) -> Any: ...

    def fetchall(self) -> Sequence[Any]: ...


class CatalogRow(NamedTuple):
    """A row of a query: one piece of the definition of an object in a schema.

    :param section: what the row describes: ``table``, ``column``, ``index``, …
    :param name: name of the object, or of the table to which the piece belongs.
    :param text: the piece, mostly SQL. The schema is not named in it, except where the server
        always does: in the heads and bodies of functions and statistics.
    :param detail: a second text, whose meaning depends on the section.
    """

    section: str
    name: str
    text: str
    detail: str | None


# The query for the objects of the schema. It leaves out objects of extensions (dependency type "e")
# and objects that are part of another one (type "i"), such as the sequence of an identity column.
#
# For a table, view or sequence, the third column is a text of letters. The first one is the kind of
# the object in pg_class. Each other letter stands for a property that another query must read: for
# example, T means that the object has triggers. The cast to regnamespace raises error 3F000 if the
# schema does not exist.
_LIST = """\
SELECT d.classid::regclass::text, d.objid::int8, concat(
  c.relkind,
  CASE WHEN c.relpersistence = 'u' OR c.relrowsecurity OR c.relforcerowsecurity OR c.relreplident <> 'd'
    THEN 'A' END,
  CASE WHEN EXISTS (SELECT FROM pg_inherits h WHERE h.inhrelid = c.oid) THEN 'H' END,
  CASE WHEN EXISTS (
    SELECT FROM pg_description x WHERE x.objoid = c.oid AND x.classoid = 'pg_class'::regclass
  ) THEN 'C' END,
  CASE WHEN c.relhastriggers THEN 'T' END,
  CASE WHEN c.relhasrules AND EXISTS (
    SELECT FROM pg_rewrite x WHERE x.ev_class = c.oid AND x.rulename <> '_RETURN'
  ) THEN 'R' END,
  CASE WHEN EXISTS (SELECT FROM pg_policy x WHERE x.polrelid = c.oid) THEN 'P' END
)
FROM pg_depend d
LEFT JOIN pg_class c ON d.classid = 'pg_class'::regclass AND c.oid = d.objid
WHERE d.refclassid = 'pg_namespace'::regclass AND d.deptype = 'n'
  AND d.refobjid = quote_ident(%(schema)s)::regnamespace
  AND NOT EXISTS (
    SELECT FROM pg_depend o
    WHERE o.classid = d.classid AND o.objid = d.objid AND o.objsubid = 0 AND o.deptype IN ('e', 'i')
  )
UNION ALL
SELECT current_schema(), NULL, NULL"""

_RELATION = """\
WITH relation AS MATERIALIZED (
  SELECT c.oid, c.relname::text AS name, c.relkind AS kind, c.relpersistence AS persistence,
    c.relispartition AS is_partition, c.relrowsecurity AS has_policies,
    c.relforcerowsecurity AS forces_policies, c.relreplident AS identity, c.reloptions AS options,
    c.relpartbound AS bound, m.amname AS method
  FROM pg_class c LEFT JOIN pg_am m ON m.oid = c.relam
  WHERE c.oid = ANY (%(pg_class)s::oid[]) AND NOT starts_with(c.relname, %(own)s)
)
"""


def _quoted(name: str) -> str:
    """Return an SQL expression that writes an identifier in quotes, even if it needs none.

    :param name: an SQL expression for the identifier, such as a column.
    """
    return f"""'"' || replace({name}, '"', '""') || '"'"""


_OPTIONS = """\
(SELECT ' WITH (' || string_agg(quote_ident(o.option_name) || '=' || quote_literal(o.option_value), ', ')
  || ')' FROM pg_options_to_table(relation.options) o)"""

# SQL for the options of a sequence, without those that have their default. The defaults of a
# descending sequence differ, so all options of such a sequence are written.
_SEQUENCE = """\
concat(
  CASE WHEN q.seqincrement <> 1 THEN ' INCREMENT BY ' || q.seqincrement END,
  CASE WHEN q.seqmin <> 1 OR q.seqincrement < 0 THEN ' MINVALUE ' || q.seqmin END,
  CASE WHEN q.seqincrement < 0 OR q.seqmax <> (
      CASE q.seqtypid WHEN 'int2'::regtype THEN 32767 WHEN 'int4'::regtype THEN 2147483647
      ELSE 9223372036854775807 END
    ) THEN ' MAXVALUE ' || q.seqmax END,
  CASE WHEN q.seqstart <> q.seqmin THEN ' START WITH ' || q.seqstart END,
  CASE WHEN q.seqcache <> 1 THEN ' CACHE ' || q.seqcache END,
  CASE WHEN q.seqcycle THEN ' CYCLE' END
)"""

_TABLES = f"""\
SELECT 'table', name, concat(
  CASE WHEN kind = 'p' THEN ' PARTITION BY ' || pg_get_partkeydef(oid) END,
  CASE WHEN method <> 'heap' THEN ' USING ' || quote_ident(method) END,
  {_OPTIONS}
), NULL
FROM relation WHERE kind IN ('r', 'p')"""

_FOREIGN_TABLES = "SELECT 'other', 'foreign table', name, NULL FROM relation WHERE kind = 'f'"

_COLUMNS = f"""\
SELECT 'column', relation.name, concat(
  {_quoted("a.attname")}, ' ', format_type(a.atttypid, a.atttypmod),
  CASE WHEN a.attcollation <> 0 AND a.attcollation <> (
    SELECT t.typcollation FROM pg_type t WHERE t.oid = a.atttypid
  ) THEN ' COLLATE ' || a.attcollation::regcollation END,
  CASE WHEN a.attidentity <> '' THEN (
    SELECT concat(
      ' GENERATED ', CASE a.attidentity WHEN 'a' THEN 'ALWAYS' ELSE 'BY DEFAULT' END,
      ' AS IDENTITY (SEQUENCE NAME ', {_quoted("s.relname")}, {_SEQUENCE}, ')'
    )
    FROM pg_depend i JOIN pg_class s ON s.oid = i.objid JOIN pg_sequence q ON q.seqrelid = i.objid
    WHERE i.refclassid = 'pg_class'::regclass AND i.refobjid = a.attrelid AND i.refobjsubid = a.attnum
      AND i.classid = 'pg_class'::regclass AND i.deptype = 'i'
  ) END,
  CASE WHEN a.atthasdef THEN (
    SELECT CASE a.attgenerated
      WHEN '' THEN ' DEFAULT ' || x.value
      WHEN 's' THEN ' GENERATED ALWAYS AS (' || x.value || ') STORED'
      ELSE ' GENERATED ALWAYS AS (' || x.value || ')'
    END
    FROM pg_attrdef d CROSS JOIN LATERAL (SELECT pg_get_expr(d.adbin, d.adrelid)) AS x (value)
    WHERE d.adrelid = a.attrelid AND d.adnum = a.attnum
  ) END,
  CASE WHEN a.attnotnull THEN ' NOT NULL' END
), lpad(a.attnum::text, 5, '0')
FROM relation JOIN pg_attribute a ON a.attrelid = relation.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE relation.kind IN ('r', 'p')"""

_CONSTRAINTS = f"""\
SELECT 'constraint', relation.name,
  'CONSTRAINT ' || {_quoted("c.conname")} || ' ' || pg_get_constraintdef(c.oid), c.conname
FROM relation JOIN pg_constraint c ON c.conrelid = relation.oid
WHERE c.contype IN ('c', 'f', 'p', 'u', 'x')"""

_ADDITIONS = f"""\
SELECT 'addition', relation.name, 'ALTER TABLE ' || {_quoted("relation.name")} || x.change, x.position
FROM relation CROSS JOIN LATERAL (VALUES
  ('1', CASE persistence WHEN 'u' THEN ' SET UNLOGGED' END),
  ('2', CASE WHEN has_policies THEN ' ENABLE ROW LEVEL SECURITY' END),
  ('3', CASE WHEN forces_policies THEN ' FORCE ROW LEVEL SECURITY' END),
  ('4', CASE identity WHEN 'f' THEN ' REPLICA IDENTITY FULL' WHEN 'n' THEN ' REPLICA IDENTITY NOTHING'
    WHEN 'i' THEN ' REPLICA IDENTITY USING INDEX ' || (
      SELECT {_quoted("x.relname")} FROM pg_index i JOIN pg_class x ON x.oid = i.indexrelid
      WHERE i.indrelid = relation.oid AND i.indisreplident
    ) END)
) AS x (position, change)
WHERE relation.kind IN ('r', 'p') AND x.change IS NOT NULL"""

_PARENTS = f"""\
SELECT 'addition', relation.name, CASE WHEN relation.is_partition
  THEN 'ALTER TABLE ONLY ' || p.oid::regclass || ' ATTACH PARTITION ' || {_quoted("relation.name")}
    || ' ' || pg_get_expr(relation.bound, relation.oid)
  ELSE 'ALTER TABLE ' || {_quoted("relation.name")} || ' INHERIT ' || p.oid::regclass END,
  '5' || lpad(h.inhseqno::text, 5, '0')
FROM relation JOIN pg_inherits h ON h.inhrelid = relation.oid JOIN pg_class p ON p.oid = h.inhparent
WHERE relation.kind IN ('r', 'p')"""

_COMMENTS = f"""\
SELECT 'addition', relation.name, concat(
  'COMMENT ON ', CASE WHEN c.objsubid = 0 THEN 'TABLE ' ELSE 'COLUMN ' END,
  {_quoted("relation.name")}, '.' || {_quoted("a.attname")}, ' IS ', quote_literal(c.description)
), '6' || lpad(c.objsubid::text, 5, '0')
FROM relation
JOIN pg_description c ON c.classoid = 'pg_class'::regclass AND c.objoid = relation.oid
LEFT JOIN pg_attribute a ON a.attrelid = c.objoid AND a.attnum = c.objsubid AND c.objsubid > 0
WHERE relation.kind IN ('r', 'p')"""

# The query for indexes, except those that belong to a constraint. Its calls of pg_get_indexdef()
# have the argument "pretty". The server then writes the definition of an index without the schema
# of the table. The same is true for triggers and rules.
_INDEXES = """\
SELECT 'index', x.relname, pg_get_indexdef(i.indexrelid, 0, true),
  CASE WHEN NOT i.indisvalid AND relation.kind <> 'p' THEN 'invalid' END
FROM relation
JOIN pg_index i ON i.indrelid = relation.oid
JOIN pg_class x ON x.oid = i.indexrelid
WHERE relation.kind IN ('r', 'p', 'm') AND NOT EXISTS (
  SELECT FROM pg_constraint c
  WHERE c.conrelid = i.indrelid AND c.conindid = i.indexrelid AND c.contype IN ('p', 'u', 'x')
)"""

_SEQUENCES = f"""\
SELECT 'sequence', relation.name, concat(
  'CREATE SEQUENCE ', {_quoted("relation.name")},
  CASE WHEN q.seqtypid <> 'int8'::regtype THEN ' AS ' || format_type(q.seqtypid, NULL) END, {_SEQUENCE}
), (
  SELECT o.refobjid::regclass || '.' || quote_ident(a.attname)
  FROM pg_depend o JOIN pg_attribute a ON a.attrelid = o.refobjid AND a.attnum = o.refobjsubid
  WHERE o.classid = 'pg_class'::regclass AND o.objid = relation.oid AND o.deptype = 'a'
    AND o.refclassid = 'pg_class'::regclass
)
FROM relation JOIN pg_sequence q ON q.seqrelid = relation.oid"""

# The query for the counters of tables. The counter of a table is the next value of the sequence
# that fills one of its columns. If there are several such sequences, it is the lowest of their next
# values. A table is left out if one of its sequences has never returned a value. Sequences that
# this account may not read are ignored.
_COUNTERS = """\
SELECT 'counter', relation.name, min(pg_sequence_last_value(q.seqrelid) + q.seqincrement)::text, NULL
FROM relation
JOIN pg_depend o ON o.refclassid = 'pg_class'::regclass AND o.refobjid = relation.oid
  AND o.refobjsubid > 0 AND o.classid = 'pg_class'::regclass AND o.deptype IN ('a', 'i')
JOIN pg_sequence q ON q.seqrelid = o.objid
WHERE has_sequence_privilege(q.seqrelid, 'SELECT, USAGE')
GROUP BY relation.name
HAVING count(*) = count(pg_sequence_last_value(q.seqrelid))"""

_VIEWS = f"""\
SELECT 'view', name, concat(
  'CREATE ', CASE kind WHEN 'm' THEN 'MATERIALIZED ' END, 'VIEW ', {_quoted("name")},
  {_OPTIONS}, E' AS\\n', rtrim(pg_get_viewdef(oid), ';')
), NULL
FROM relation WHERE kind IN ('v', 'm')"""

# The query for triggers. It leaves out those that a partition has inherited, because they are
# created together with the trigger of the partitioned table.
_TRIGGERS = """\
SELECT 'trigger', t.tgname, pg_get_triggerdef(t.oid, true), relation.name || t.tgenabled::text
FROM relation JOIN pg_trigger t ON t.tgrelid = relation.oid
WHERE NOT t.tgisinternal AND t.tgparentid = 0 AND NOT starts_with(t.tgname, %(own)s)"""

_RULES = """\
SELECT 'rule', r.rulename, pg_get_ruledef(r.oid, true), relation.name
FROM relation JOIN pg_rewrite r ON r.ev_class = relation.oid WHERE r.rulename <> '_RETURN'"""

_POLICIES = """\
SELECT 'policy', p.polname, concat(
  'CREATE POLICY ', quote_ident(p.polname), ' ON ', quote_ident(relation.name),
  CASE WHEN NOT p.polpermissive THEN ' AS RESTRICTIVE' END,
  CASE p.polcmd WHEN 'r' THEN ' FOR SELECT' WHEN 'a' THEN ' FOR INSERT' WHEN 'w' THEN ' FOR UPDATE'
    WHEN 'd' THEN ' FOR DELETE' END,
  ' TO ' || (SELECT string_agg(r.oid::regrole::text, ', ' ORDER BY r.rolname) FROM pg_roles r
    WHERE r.oid = ANY (p.polroles)),
  ' USING (' || pg_get_expr(p.polqual, p.polrelid) || ')',
  ' WITH CHECK (' || pg_get_expr(p.polwithcheck, p.polrelid) || ')'
), relation.name
FROM relation JOIN pg_policy p ON p.polrelid = relation.oid"""

# Pairs (letters, query). Each letter stands for a kind or property of tables, views or sequences. A
# query is sent only if the schema has an object with one of its letters.
_RELATIONS = (
    ("rp", _TABLES),
    ("f", _FOREIGN_TABLES),
    ("rp", _COLUMNS),
    ("rp", _CONSTRAINTS),
    ("A", _ADDITIONS),
    ("H", _PARENTS),
    ("C", _COMMENTS),
    ("rpm", _INDEXES),
    ("S", _SEQUENCES),
    ("rp", _COUNTERS),
    ("vm", _VIEWS),
    ("T", _TRIGGERS),
    ("R", _RULES),
    ("P", _POLICIES),
)

# The query for functions. If a function names a table in its arguments or SQL body, it must be
# created after the tables, so the query appends a mark to its definition.
_FUNCTIONS = """\
SELECT 'function', p.proname || '(' || pg_get_function_identity_arguments(p.oid) || ')',
  pg_get_functiondef(p.oid) || CASE WHEN EXISTS (
    SELECT FROM pg_depend o
    LEFT JOIN pg_type t ON o.refclassid = 'pg_type'::regclass AND t.oid = o.refobjid
    LEFT JOIN pg_type e ON e.oid = t.typelem
    JOIN pg_class c ON c.oid = CASE WHEN o.refclassid = 'pg_class'::regclass THEN o.refobjid
      ELSE coalesce(nullif(t.typrelid, 0), e.typrelid) END
    WHERE o.classid = 'pg_proc'::regclass AND o.objid = p.oid AND c.relkind <> 'c'
  ) THEN '/* uses tables */' ELSE '' END, quote_ident(%(schema)s)
FROM pg_proc p
WHERE p.oid = ANY (%(pg_proc)s::oid[]) AND p.prokind <> 'a' AND NOT starts_with(p.proname, %(own)s)
UNION ALL
SELECT 'other', 'aggregate', p.proname || '(' || pg_get_function_identity_arguments(p.oid) || ')', NULL
FROM pg_proc p WHERE p.oid = ANY (%(pg_proc)s::oid[]) AND p.prokind = 'a'"""

_COLLATE = "CASE WHEN {0} <> t.typcollation THEN ' COLLATE ' || ({0})::regcollation END"
_TYPES = f"""\
SELECT 'type', t.typname, concat('CREATE TYPE ', {_quoted("t.typname")}, ' AS ENUM (', (
  SELECT string_agg(quote_literal(e.enumlabel), ', ' ORDER BY e.enumsortorder)
  FROM pg_enum e WHERE e.enumtypid = t.oid
), ')'), NULL
FROM pg_type t WHERE t.oid = ANY (%(pg_type)s::oid[]) AND t.typtype = 'e'
UNION ALL
SELECT 'type', d.typname, concat(
  'CREATE DOMAIN ', {_quoted("d.typname")}, ' AS ', format_type(d.typbasetype, d.typtypmod),
  {_COLLATE.format("d.typcollation")},
  ' DEFAULT ' || pg_get_expr(d.typdefaultbin, 0), CASE WHEN d.typnotnull THEN ' NOT NULL' END, (
    SELECT string_agg(' CONSTRAINT ' || {_quoted("c.conname")} || ' ' || pg_get_constraintdef(c.oid), ''
      ORDER BY c.conname)
    FROM pg_constraint c WHERE c.contypid = d.oid AND c.contype = 'c'
  )
), NULL
FROM pg_type d JOIN pg_type t ON t.oid = d.typbasetype
WHERE d.oid = ANY (%(pg_type)s::oid[]) AND d.typtype = 'd'
UNION ALL
SELECT 'type', c.typname, concat('CREATE TYPE ', {_quoted("c.typname")}, ' AS (', (
  SELECT string_agg(
    concat({_quoted("a.attname")}, ' ', format_type(a.atttypid, a.atttypmod),
      {_COLLATE.format("a.attcollation")}), ', ' ORDER BY a.attnum)
  FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
  WHERE a.attrelid = c.typrelid AND a.attnum > 0 AND NOT a.attisdropped
), ')'), NULL
FROM pg_type c WHERE c.oid = ANY (%(pg_type)s::oid[]) AND c.typtype = 'c'
UNION ALL
SELECT 'type', c.typname, concat(
  'CREATE TYPE ', {_quoted("c.typname")}, ' AS RANGE (SUBTYPE = ', format_type(r.rngsubtype, NULL),
  CASE WHEN NOT o.opcdefault THEN ', SUBTYPE_OPCLASS = ' || quote_ident(o.opcname) END,
  CASE WHEN r.rngcollation <> t.typcollation THEN ', COLLATION = ' || r.rngcollation::regcollation END,
  CASE WHEN r.rngcanonical <> 0 THEN ', CANONICAL = ' || r.rngcanonical END,
  CASE WHEN r.rngsubdiff <> 0 THEN ', SUBTYPE_DIFF = ' || r.rngsubdiff END,
  ', MULTIRANGE_TYPE_NAME = ', r.rngmultitypid::regtype, ')'
), NULL
FROM pg_type c JOIN pg_range r ON r.rngtypid = c.oid
JOIN pg_type t ON t.oid = r.rngsubtype JOIN pg_opclass o ON o.oid = r.rngsubopc
WHERE c.oid = ANY (%(pg_type)s::oid[]) AND c.typtype = 'r'
UNION ALL
SELECT 'other', 'type', b.typname, NULL
FROM pg_type b WHERE b.oid = ANY (%(pg_type)s::oid[]) AND b.typtype = 'b'"""

# The query for collations. It reads each row of the catalog as JSON, because the column with the
# locale has different names in different versions of the server.
_COLLATIONS = f"""\
SELECT 'type', c.collname, concat(
  'CREATE COLLATION ', {_quoted("c.collname")}, ' (PROVIDER = ',
  CASE c.collprovider WHEN 'c' THEN 'libc' WHEN 'i' THEN 'icu' ELSE 'builtin' END,
  CASE WHEN c.collprovider = 'c' THEN ', LC_COLLATE = ' || quote_literal(c.collcollate)
      || ', LC_CTYPE = ' || quote_literal(c.collctype)
    ELSE ', LOCALE = ' || quote_literal(
      coalesce(j.row ->> 'colllocale', j.row ->> 'colliculocale', j.row ->> 'collcollate')) END,
  ', RULES = ' || quote_literal(j.row ->> 'collicurules'),
  CASE WHEN NOT c.collisdeterministic THEN ', DETERMINISTIC = false' END, ')'
), NULL
FROM pg_collation c CROSS JOIN LATERAL (SELECT to_jsonb(c)) AS j (row)
WHERE c.oid = ANY (%(pg_collation)s::oid[])"""

_STATISTICS = """\
SELECT 'statistics', s.stxname, pg_get_statisticsobjdef(s.oid), quote_ident(%(schema)s)
FROM pg_statistic_ext s WHERE s.oid = ANY (%(pg_statistic_ext)s::oid[])"""

# Queries for objects other than tables, views and sequences. Maps the name of a catalog to its
# query.
_QUERIES = {
    "pg_proc": _FUNCTIONS,
    "pg_type": _TYPES,
    "pg_collation": _COLLATIONS,
    "pg_statistic_ext": _STATISTICS,
}
_KNOWN = ("pg_class", *_QUERIES)
# The query for objects of all other catalogs, such as operators. It reads their names only.
_OTHERS = """\
SELECT 'other', i.type, i.identity, quote_ident(%(schema)s)
FROM unnest(%(catalogs)s::regclass[], %(others)s::oid[]) AS o (catalog, id)
CROSS JOIN LATERAL pg_identify_object(o.catalog, o.id, 0) i"""
# Catalogs whose objects are not read. Extensions belong to the whole database, and migrations do
# not manage default privileges and publications.
_IGNORED = frozenset({"pg_extension", "pg_default_acl", "pg_publication_namespace"})


def read(cursor: CatalogCursor, schema: str) -> list[CatalogRow]:
    """Return the definitions of all objects in ``schema``. Each row has one piece of a definition.

    Costs two queries, or one if the schema is empty.

    :param cursor: a cursor whose search path begins with ``schema``, so that the server returns
        names without the schema.
    :raises django.db.Error: the schema does not exist (SQLSTATE 3F000).
    """
    cursor.execute(_LIST, {"schema": schema})
    oids: dict[str, list[int]] = {}
    letters: set[str] = set()
    for catalog, oid, properties in cursor.fetchall():
        if oid is None:
            assert catalog == schema, f"the cursor reads {catalog!r} instead of {schema!r}"
        elif catalog not in _IGNORED:
            oids.setdefault(catalog, []).append(oid)
            letters.update(properties)
    others = [(catalog, oid) for catalog in oids if catalog not in _KNOWN for oid in oids[catalog]]
    queries = [query for needs, query in _RELATIONS if not letters.isdisjoint(needs)]
    queries += [query for catalog, query in _QUERIES.items() if catalog in oids]
    if others:
        queries.append(_OTHERS)
    if not queries:
        return []
    cursor.execute(
        _RELATION + "\nUNION ALL\n".join(queries),
        {
            "schema": schema,
            "own": OWN_PREFIX,
            "catalogs": _array(f"pg_catalog.{catalog}" for catalog, _ in others),
            "others": _array(oid for _, oid in others),
            **{catalog: _array(oids.get(catalog, ())) for catalog in _KNOWN},
        },
    )
    return [CatalogRow(*row) for row in cursor.fetchall()]


def _array(values: Iterable[object]) -> str:
    # Write the list as text, because the project may have changed how the driver passes lists.
    return "{" + ",".join(map(str, values)) + "}"
