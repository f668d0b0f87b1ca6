"""Query the objects of a PostgreSQL schema, to move it to another node, and find those that prevent
the move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from django.db import ProgrammingError

from sharded_orm.backends.postgresql.creation_order import unknown
from sharded_orm.backends.postgresql.definitions import USES_TABLES
from sharded_orm.backends.postgresql.sql_quotes import quoted
from sharded_orm.backends.snapshot import OWN_PREFIX, SchemaSnapshot, kind_of
from sharded_orm.exceptions import MoveFailed

Run = Callable[..., list[tuple[Any, ...]]]

_NAMESPACE: Final = "(SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = %s)"
# Types that the primary key of a table in a moving schema may have. A trigger can write their
# values exactly into the journal of changed rows. _CATEGORIES has letters for categories of types:
# boolean, enumerated, network, numeric, text, and date and time. _RECORDABLE lists other types by
# name.
_CATEGORIES: Final = "BEINSTD"
_RECORDABLE: Final = ("uuid", "bytea", "macaddr", "macaddr8")
# The names of functions that generate ids begin with this. Such a function contains the number of
# its shard, so this number is left out when the definitions of two schemas are compared.
_ID_FUNCTION: Final = "sharded_orm_next_id_"
_NOT_MOVED: Final = frozenset({"view", "trigger", "rule", "policy"})


def relations(run: Run, schema: str, kinds: str) -> list[str]:
    """Return the names of tables, sequences and the like in the schema, sorted.

    :param kinds: which kinds, as letters of ``pg_class.relkind``. For example, "rS" for tables and
        sequences.
    """
    rows = run(
        "SELECT relname FROM pg_catalog.pg_class WHERE relkind::text = ANY(%s) AND relnamespace ="
        f" {_NAMESPACE} ORDER BY relname",
        list(kinds),
        schema,
    )
    return [str(name) for (name,) in rows]


def primary_key(run: Run, table: str) -> tuple[str, ...]:
    """Return the columns of a table's primary key, in the order in which the key has them.

    :param table: the quoted name of the table.
    """
    rows = run(
        "SELECT a.attname FROM pg_catalog.pg_index i, pg_catalog.unnest(i.indkey::int2[])"
        " WITH ORDINALITY k (number, place), pg_catalog.pg_attribute a"
        " WHERE i.indrelid = %s::pg_catalog.regclass AND i.indisprimary"
        " AND k.place <= i.indnkeyatts AND a.attrelid = i.indrelid AND a.attnum = k.number"
        " ORDER BY k.place",
        table,
    )
    return tuple(str(name) for (name,) in rows)


def foreign_keys(run: Run, schema: str) -> list[tuple[str, str, str]]:
    """Return the foreign keys of the schema, as tuples (table, name of the key, definition)."""
    rows = run(
        "SELECT c.relname, k.conname, pg_catalog.pg_get_constraintdef(k.oid)"
        " FROM pg_catalog.pg_constraint k JOIN pg_catalog.pg_class c ON c.oid = k.conrelid"
        f" WHERE k.contype = 'f' AND c.relnamespace = {_NAMESPACE} ORDER BY 1, 2",
        schema,
    )
    return [(str(table), str(name), str(definition)) for table, name, definition in rows]


def with_default_vacuum(run: Run, schema: str) -> list[str]:
    """Return the tables of the schema that have no setting ``autovacuum_enabled`` of their own."""
    rows = run(
        "SELECT relname FROM pg_catalog.pg_class WHERE relkind = 'r' AND relnamespace ="
        f" {_NAMESPACE} AND NOT EXISTS (SELECT FROM pg_catalog.unnest(reloptions) o"
        " WHERE pg_catalog.starts_with(o, 'autovacuum_enabled=')) AND NOT"
        " pg_catalog.starts_with(relname::text, %s) ORDER BY relname",
        schema,
        OWN_PREFIX,
    )
    return [str(name) for (name,) in rows]


def additions(run: Run, schema: str) -> Iterator[tuple[str, str]]:
    """Yield the statements that are needed to copy a schema, but cannot be made from its snapshot.

    Some grant privileges on tables and sequences to other roles than the owner. The others create
    the functions that generate ids. Such a function contains the number of its shard, which the
    snapshot leaves out. Each item is a pair (key of the object in the snapshot, statement).
    """
    for name, kind, privileges, role in run(
        "SELECT c.relname, c.relkind, pg_catalog.string_agg(a.privilege_type ||"
        " CASE WHEN a.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END, ',' ORDER BY 1),"
        " CASE WHEN a.grantee = 0 THEN 'PUBLIC' ELSE a.grantee::pg_catalog.regrole::text END"
        " FROM pg_catalog.pg_class c, pg_catalog.aclexplode(c.relacl) a"
        f" WHERE c.relnamespace = {_NAMESPACE} AND c.relkind IN ('r', 'S')"
        " AND a.grantee <> c.relowner AND NOT pg_catalog.starts_with(c.relname::text, %s)"
        " GROUP BY c.relname, c.relkind, a.grantee ORDER BY 1, 4",
        schema,
        OWN_PREFIX,
    ):
        what = "SEQUENCE" if kind == "S" else "TABLE"
        for grantable in (False, True):
            granted = [
                privilege.removesuffix(" WITH GRANT OPTION")
                for privilege in str(privileges).split(",")
                if privilege.endswith(" WITH GRANT OPTION") == grantable
            ]
            if granted:
                yield (
                    str(name),
                    f"GRANT {', '.join(granted)} ON {what} {quoted(name)} TO {role}"
                    f"{' WITH GRANT OPTION' if grantable else ''}",
                )
    for name, definition, qualifier in run(
        "SELECT p.proname || '(' || pg_catalog.pg_get_function_identity_arguments(p.oid) || ')',"
        " pg_catalog.pg_get_functiondef(p.oid), pg_catalog.quote_ident(%s) || '.'"
        " FROM pg_catalog.pg_proc p"
        f" WHERE p.pronamespace = {_NAMESPACE} AND pg_catalog.starts_with(p.proname::text, %s)"
        " ORDER BY 1",
        schema,
        schema,
        _ID_FUNCTION,
    ):
        yield f"function {name}", str(definition).replace(qualifier, "", 1)


def obstacles(run: Run, schema: str, definitions: SchemaSnapshot) -> Iterator[str]:
    """Yield the reasons why the schema cannot be moved, as sentences for the operator."""
    for name, definition in definitions.definitions.items():
        kind = kind_of(definition)
        if kind in _NOT_MOVED:
            yield f"it has the {kind} {name.removeprefix(f'{kind} ')!r}, which would not be moved: drop it"
        elif definition.endswith(USES_TABLES):
            yield (
                f"it has the {name!r}, which refers to tables by itself, whatever their names are:"
                " create it with a body in quotes"
            )
    for name in unknown(definitions.definitions):
        yield f"it has the {name}, for which there is no statement: create it in another schema"
    for name, problem in run(
        "SELECT relname, CASE WHEN relkind = 'p' THEN 'is partitioned'"
        " WHEN relrowsecurity THEN 'has row security, which hides rows'"
        " WHEN EXISTS (SELECT FROM pg_catalog.pg_attribute WHERE attrelid = c.oid AND attacl IS NOT NULL)"
        " THEN 'has privileges on columns' ELSE 'inherits from another table, or another from it' END"
        " FROM pg_catalog.pg_class c WHERE relkind IN ('r', 'p') AND relnamespace ="
        f" {_NAMESPACE} AND (relkind = 'p' OR relrowsecurity OR EXISTS (SELECT FROM"
        " pg_catalog.pg_inherits WHERE c.oid IN (inhrelid, inhparent)) OR EXISTS (SELECT FROM"
        " pg_catalog.pg_attribute WHERE attrelid = c.oid AND attacl IS NOT NULL)) ORDER BY relname",
        schema,
    ):
        yield f"the table {name!r} {problem}: only ordinary tables are moved"
    for name, column, kind in run(
        "SELECT c.relname, a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod)"
        " FROM pg_catalog.pg_index i JOIN pg_catalog.pg_class c ON c.oid = i.indrelid"
        " JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum = ANY(i.indkey::int2[])"
        " JOIN pg_catalog.pg_type t ON t.oid = a.atttypid"
        f" WHERE i.indisprimary AND c.relnamespace = {_NAMESPACE}"
        " AND NOT (t.typcategory::text = ANY(%s) OR t.typname::text = ANY(%s)) AND NOT"
        " pg_catalog.starts_with(c.relname::text, %s) ORDER BY 1, 2",
        schema,
        list(_CATEGORIES),
        list(_RECORDABLE),
        OWN_PREFIX,
    ):
        yield (
            f"a trigger cannot record changes of the table {name!r}, because the column {column!r} of"
            f" its primary key is of the type {kind}"
        )
    for name, other in run(
        "SELECT c.relname, k.confrelid::pg_catalog.regclass::text FROM pg_catalog.pg_constraint k"
        " JOIN pg_catalog.pg_class c ON c.oid = k.conrelid"
        " JOIN pg_catalog.pg_class f ON f.oid = k.confrelid WHERE k.contype = 'f'"
        f" AND c.relnamespace = {_NAMESPACE} AND f.relnamespace <> c.relnamespace ORDER BY 1, 2",
        schema,
    ):
        yield f"a foreign key of the table {name!r} leads to another schema ({other})"
    for name, other in _users(run, schema):
        yield f"{other} uses the table or type {name!r}: drop it first"


def _users(run: Run, schema: str) -> list[tuple[str, str]]:
    """Return pairs (object of this schema, object of another schema that uses it)."""
    rows = run(
        "SELECT f.relname, 'the foreign key ' || k.conname || ' of ' || k.conrelid::regclass"
        " FROM pg_catalog.pg_constraint k JOIN pg_catalog.pg_class f ON f.oid = k.confrelid"
        " JOIN pg_catalog.pg_class c ON c.oid = k.conrelid WHERE k.contype = 'f'"
        f" AND f.relnamespace = {_NAMESPACE} AND c.relnamespace <> f.relnamespace"
        " UNION ALL SELECT DISTINCT c.relname, 'the view ' || v.oid::regclass"
        " FROM pg_catalog.pg_depend d JOIN pg_catalog.pg_class c ON c.oid = d.refobjid"
        " JOIN pg_catalog.pg_rewrite r ON r.oid = d.objid"
        " JOIN pg_catalog.pg_class v ON v.oid = r.ev_class"
        " WHERE d.classid = 'pg_catalog.pg_rewrite'::regclass"
        " AND d.refclassid = 'pg_catalog.pg_class'::regclass"
        f" AND c.relnamespace = {_NAMESPACE} AND v.relnamespace <> c.relnamespace"
        " UNION ALL SELECT t.typname, 'the table ' || c.oid::regclass"
        " FROM pg_catalog.pg_type t JOIN pg_catalog.pg_attribute a ON a.atttypid = t.oid"
        " JOIN pg_catalog.pg_class c ON c.oid = a.attrelid"
        f" WHERE t.typnamespace = {_NAMESPACE} AND c.relnamespace <> t.typnamespace"
        " AND c.relkind NOT IN ('i', 'I') ORDER BY 1, 2",
        schema,
        schema,
        schema,
    )
    return [(str(name), str(other)) for name, other in rows]


def require_no_users(run: Run, schema: str) -> None:
    """Refuse to drop the schema if an object of another schema would be dropped with it.

    :raises MoveFailed: such an object exists, for example a foreign key to a table of this schema.
    """
    for name, other in _users(run, schema):
        raise MoveFailed(
            f"The schema {schema!r} cannot be dropped, because {other} uses {name!r} of it: drop that first."
        )


def become_owner(run: Run, schema: str, alias: str) -> None:
    """Take the role of the schema's owner for this transaction. The objects that the transaction
    creates then belong to this owner, so that the application can use them.

    :raises MoveFailed: this account may not take the role.
    """
    ((owner, user, may),) = run(
        "SELECT pg_catalog.pg_get_userbyid(nspowner), current_user,"
        " pg_catalog.pg_has_role(nspowner, 'MEMBER') FROM pg_catalog.pg_namespace WHERE nspname = %s",
        schema,
    )
    if not may:
        raise MoveFailed(
            f"The account {user!r} cannot create the tables of {alias!r} for {owner!r}, who owns the"
            f" schema {schema!r}: make it a member of that role (GRANT … TO …)."
        )
    if owner != user:
        run(f"SET LOCAL ROLE {quoted(owner)}")


def empty(run: Run, schema: str) -> None:
    """Drop the functions, types and other objects of a schema that has no tables, in this
    transaction.

    Does nothing if the schema has tables. The privileges on the schema stay.

    :raises MoveFailed: an object of another schema uses this schema.
    """
    rows = run(
        "SELECT o.type, o.identity FROM pg_catalog.pg_depend d CROSS JOIN LATERAL"
        " pg_catalog.pg_identify_object(d.classid, d.objid, 0) o"
        " WHERE d.refclassid = 'pg_catalog.pg_namespace'::regclass AND d.deptype = 'n'"
        f" AND d.refobjid = {_NAMESPACE} AND d.classid <> 'pg_catalog.pg_class'::regclass"
        " AND d.classid <> 'pg_catalog.pg_extension'::regclass AND NOT EXISTS (SELECT FROM"
        " pg_catalog.pg_depend e WHERE e.classid = d.classid AND e.objid = d.objid"
        " AND e.deptype IN ('e', 'i'))",
        schema,
    )
    if not rows or relations(run, schema, "rpvmf"):
        return
    require_no_users(run, schema)
    for kind, identity in rows:
        try:
            run("SAVEPOINT dropping")
            run(f"DROP {str(kind).upper()} IF EXISTS {identity} CASCADE")
        except ProgrammingError:
            # SQL has no DROP for this kind of object, so it stays. The move later compares this
            # schema with that of the source, and reports the object then.
            run("ROLLBACK TO SAVEPOINT dropping")
