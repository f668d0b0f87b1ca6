"""Django's compilers: on a shard they look at keys of text; those of writes tell of them."""

from __future__ import annotations

from django.db.backends.mysql import compiler

from sharded_orm.backends.write_hooks.compilers import ReadMixin, WriteMixin


class SQLCompiler(ReadMixin, compiler.SQLCompiler):
    """A SELECT."""


class SQLAggregateCompiler(ReadMixin, compiler.SQLAggregateCompiler):
    """A SELECT of aggregates of another one."""


class SQLInsertCompiler(WriteMixin, compiler.SQLInsertCompiler):
    """An INSERT that the cache hears of."""


class SQLUpdateCompiler(WriteMixin, compiler.SQLUpdateCompiler):
    """An UPDATE that the cache hears of."""


class SQLDeleteCompiler(WriteMixin, compiler.SQLDeleteCompiler):
    """A DELETE that the cache hears of."""
