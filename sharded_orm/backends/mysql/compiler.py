"""Django's compilers; those of writes tell of them."""

from __future__ import annotations

from django.db.backends.mysql import compiler

from sharded_orm.backends.compilers import WriteMixin

SQLCompiler = compiler.SQLCompiler
SQLAggregateCompiler = compiler.SQLAggregateCompiler


class SQLInsertCompiler(WriteMixin, compiler.SQLInsertCompiler):
    """An INSERT that the cache hears of."""


class SQLUpdateCompiler(WriteMixin, compiler.SQLUpdateCompiler):
    """An UPDATE that the cache hears of."""


class SQLDeleteCompiler(WriteMixin, compiler.SQLDeleteCompiler):
    """A DELETE that the cache hears of."""
