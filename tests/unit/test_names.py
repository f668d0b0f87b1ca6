"""Names in the package: each class has its own, modules are called by nouns, and the import paths
that the documentation has named stay.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest
from django.utils.module_loading import import_string

import sharded_orm

PACKAGE = Path(sharded_orm.__file__).parent

# Django looks for classes of these names: commands, migrations, the parts of a backend.
NAMES_OF_DJANGO = frozenset(
    {
        "Command", "DatabaseCreation", "DatabaseFeatures", "DatabaseIntrospection",
        "DatabaseOperations", "DatabaseSchemaEditor", "DatabaseWrapper", "Migration",
        "SQLAggregateCompiler", "SQLCompiler", "SQLDeleteCompiler", "SQLInsertCompiler",
        "SQLUpdateCompiler",
    }
)  # fmt: skip

# The field's words that end like participles, by what they are the names of.
WORDS_OF_THE_FIELD = frozenset(
    {
        "routing", "sharding", "batching", "balancing", "write_tracking",  # concerns
        "embedded", "packed", "timestamped",  # kinds of ids and of their strategies
        "cached", "routed", "sharded",  # kinds of querysets
        "memcached",  # a product
        "testing",  # where users of Django look for it
        "ordering",  # an option of Meta
        "greeting",  # of a server, before the first command
        "mapping",  # of objects (P7)
    }
)  # fmt: skip

# Projects import these, because the documentation has said so. A path that moves needs a line in the
# changelog.
DOCUMENTED = [
    "sharded_orm.admin.ShardedModelAdmin",
    "sharded_orm.admin.ShardedTabularInline",
    "sharded_orm.backends.mysql.base.DatabaseWrapper",
    "sharded_orm.backends.pool.pools",
    "sharded_orm.backends.signals.session_opened",
    "sharded_orm.backends.sqlite3.base.DatabaseWrapper",
    "sharded_orm.cache.statistics.counting",
    "sharded_orm.exceptions.PartialCommitError",
    "sharded_orm.ids.layout.PackedID",
    "sharded_orm.ids.layout.TimestampedID",
    "sharded_orm.ids.layout.TimestampedLayout",
    "sharded_orm.migrations.operations.CreateSequence",
    "sharded_orm.models.KeyMove",
    "sharded_orm.models.Placement",
    "sharded_orm.routers.ShardRouter",
    "sharded_orm.routing.base.Strategy",
    "sharded_orm.signals.cache_counted",
    "sharded_orm.signals.scattered",
    "sharded_orm.testing.ensure_shards",
    "sharded_orm.topology.aliases.sharded_databases",
    "sharded_orm.topology.sources.base.TopologySource",
]


def _modules() -> Iterator[Path]:
    yield from PACKAGE.rglob("*.py")


def test_each_class_has_a_name_of_its_own() -> None:
    modules_by_class = defaultdict(list)
    for path in _modules():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name not in NAMES_OF_DJANGO:
                modules_by_class[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: paths for name, paths in modules_by_class.items() if len(paths) > 1} == {}


def test_modules_are_named_by_nouns() -> None:
    names = {path.stem for path in _modules()} | {path.parent.name for path in _modules()}
    last_words = {name: name.rpartition("_")[2] for name in names if not name.startswith("__")}
    participles = {
        name
        for name, word in last_words.items()
        if word.endswith(("ing", "ed")) and name not in WORDS_OF_THE_FIELD
    }
    assert participles == set()


@pytest.mark.parametrize("path", [*DOCUMENTED, *(f"sharded_orm.{n}" for n in sharded_orm.__all__)])
def test_documented_import_paths_stay(path: str) -> None:
    assert import_string(path)


@pytest.fixture(scope="module")
def imports() -> grimp.ImportGraph:
    # Imports inside functions and those for types count as well.
    return grimp.build_graph("sharded_orm", exclude_type_checking_imports=False, cache_dir=None)


def test_no_modules_import_each_other_in_a_circle(imports: grimp.ImportGraph) -> None:
    # The package's own face offers the public names at their first use.
    imports.remove_module("sharded_orm")
    in_circles = {
        module
        for module in imports.modules
        if any(
            imports.chain_exists(importer=imported, imported=module)
            for imported in imports.find_modules_directly_imported_by(module)
        )
    }
    assert in_circles == set()
