"""System checks of the cache.

The ids of the checks never change. All modules of ``sharded_orm.checks`` share one range of numbers.
No check in this module connects to a database or a cache server.

==================  ==========================================================
``sharded_orm.E026``  a cached model is in a database whose ENGINE is not the library's
``sharded_orm.W027``  a model has ``cache = True``, but ``SHARDED_ORM`` has no ``CACHE``
``sharded_orm.E028``  ``CACHE`` names an alias that is not in ``CACHES``
``sharded_orm.E029``  ``CACHE`` names an alias whose BACKEND the library cannot use
``sharded_orm.W030``  the cache is in the memory of each process: other processes miss changes
``sharded_orm.E031``  ``isolate_key`` is the shard key, or is not a field with a column
``sharded_orm.E032``  the database treats different values of a cached model's key as equal
``sharded_orm.E033``  ``cache = True`` is set on a child of multi-table inheritance
``sharded_orm.W034``  a cached model has ``managed = False``: other programs may write its rows
``sharded_orm.E035``  ``ShardMeta`` has an unknown name, or ``cache`` or ``same_key`` is no bool
``sharded_orm.W036``  the isolation level makes reads in a transaction bypass the cache
``sharded_orm.E075``  the database itself deletes or changes rows of a cached model (DB_CASCADE)
==================  ==========================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.apps import AppConfig, apps
from django.conf import settings
from django.core import checks
from django.db import connections, models, router
from django.db.utils import load_backend

from sharded_orm import compat, runtime
from sharded_orm.backends.collations import Collations
from sharded_orm.backends.features import features_of
from sharded_orm.backends.group.member import ShardConnectionMixin
from sharded_orm.cache.stores.factory import BACKENDS, LOCAL, problem
from sharded_orm.checks.selection import models_to_check
from sharded_orm.conf.nodes import backend_for
from sharded_orm.models.base import ShardedModel
from sharded_orm.models.cached.cached_model import (
    TokenField,
    collations_of,
    declares_cache,
    field_of,
    isolate_name,
    token_field,
)
from sharded_orm.models.global_models import GlobalModel
from sharded_orm.models.sharding.options import shard_options

_NAMES = {"group", "shard_key", "same_key", "cache", "isolate_key"}
# In a transaction with one of these isolation levels, all reads show the database at one moment in
# the past. The cache may have newer rows than that, so such reads bypass the cache.
_SNAPSHOTS = {"repeatable read", "serializable"}


@checks.register(checks.Tags.models)
def check_cached_models(
    app_configs: Sequence[AppConfig] | None = None, **kwargs: Any
) -> list[checks.CheckMessage]:
    """Check the declarations of sharded and global models that concern the cache.

    For example, a model with ``cache = True`` must not have a key whose column treats different
    values, such as "a" and "A", as equal.
    """
    messages: list[checks.CheckMessage] = []
    cached = []
    for model in models_to_check(app_configs):
        if not issubclass(model, ShardedModel | GlobalModel):
            continue
        messages += _names(model)
        messages += _child(model)
        if model._meta.proxy or not declares_cache(model):
            continue
        cached.append(model)
        if issubclass(model, ShardedModel) and not _is_declared(model):
            # Skip the other checks: the model's shard group or shard key is declared wrongly, and
            # the checks E001 to E003 report that.
            continue
        messages += _unmanaged(model)
        messages += _changed_by_database(model)
        messages += _keys(model)
        if not issubclass(model, ShardedModel):
            messages += _engine(model)
    if cached and runtime.config().cache is None:
        messages.append(
            checks.Warning(
                f"{', '.join(sorted(m._meta.label for m in cached))}: cache = True has no effect, as"
                " SHARDED_ORM has no CACHE.",
                hint='Add "CACHE": {"OBJECTS": "<an alias of CACHES>"} to SHARDED_ORM.',
                id="sharded_orm.W027",
            )
        )
    if cached and runtime.config().cache is not None:
        messages += _isolation(cached)
    return messages


@checks.register(checks.Tags.caches)
def check_cache_aliases(**kwargs: Any) -> list[checks.CheckMessage]:
    """Check the aliases in ``SHARDED_ORM["CACHE"]`` and their entries in ``CACHES``."""
    options = runtime.config().cache
    if options is None:
        return []
    messages: list[checks.CheckMessage] = []
    aliases = {"OBJECTS": options.objects, "LISTS": options.lists}
    if options.objects == options.lists:
        del aliases["LISTS"]
    aliases.update({f"ALSO_MARK[{index}]": alias for index, alias in enumerate(options.also_mark)})
    for key, alias in aliases.items():
        if alias not in settings.CACHES:
            messages.append(
                checks.Error(
                    f"SHARDED_ORM['CACHE'] {key} names {alias!r}, which is no alias of CACHES.",
                    hint=f"Use one of {sorted(settings.CACHES)!r}, or add it.",
                    id="sharded_orm.E028",
                )
            )
            continue
        if (wrong := problem(alias)) is not None:
            messages.append(
                checks.Error(
                    f"SHARDED_ORM['CACHE'] {key} cannot use {alias!r}: {wrong}.",
                    hint=f"Use an alias with one of the BACKENDs {sorted(BACKENDS)!r}.",
                    id="sharded_orm.E029",
                )
            )
        elif settings.CACHES[alias].get("BACKEND") == LOCAL and not settings.DEBUG:
            messages.append(
                checks.Warning(
                    f"The cache {alias!r} is in the memory of each process: what one process writes,"
                    " the others go on reading as it was.",
                    hint="Use memcached or Redis; or silence this if there is one process only.",
                    id="sharded_orm.W030",
                )
            )
    return messages


def _own_meta(model: Any) -> Any:
    """Return the ``ShardMeta`` that ``model`` itself or one of its abstract base classes declares.

    Return None if there is none. A ``ShardMeta`` of a concrete parent does not count: it is checked
    together with the parent, and would be reported twice otherwise.
    """
    for owner in model.__mro__:
        if "ShardMeta" in owner.__dict__:
            is_abstract = getattr(getattr(owner, "_meta", None), "abstract", True)
            return owner.ShardMeta if owner is model or is_abstract else None
    return None


def _names(model: Any) -> Iterator[checks.CheckMessage]:
    meta = _own_meta(model)
    if meta is None:
        return
    valid = {"cache", "isolate_key"}
    if issubclass(model, ShardedModel):
        valid = _NAMES.union(*(_names_of_app(config) for config in apps.get_app_configs()))
    names = {
        name
        for cls in meta.__mro__[:-1]
        for name in cls.__dict__
        if not name.startswith("_")
    }  # fmt: skip
    for name in sorted(names - valid):
        yield checks.Error(
            f"ShardMeta has the unknown name {name!r}.",
            hint=f"Use {sorted(valid)!r} only. Apps of sharded_orm.contrib, such as"
            " mirrors and lookups, add names if they are in INSTALLED_APPS.",
            obj=model,
            id="sharded_orm.E035",
        )
    for name, default in (("cache", False), ("same_key", True)):
        value = getattr(meta, name, default)
        if not isinstance(value, bool):
            yield checks.Error(
                f"ShardMeta.{name} is {value!r}.",
                hint="Set it to True or False.",
                obj=model,
                id="sharded_orm.E035",
            )


def _names_of_app(config: Any) -> frozenset[str]:
    """Return the names that the installed app ``config`` permits in ``ShardMeta``, in addition to
    the usual ones.
    """
    return getattr(config, "shard_meta_names", frozenset())


def _child(model: Any) -> Iterator[checks.CheckMessage]:
    meta = _own_meta(model)
    concrete = model._meta.concrete_model
    if meta is None or not getattr(meta, "cache", False) or not concrete._meta.parents:
        return
    yield checks.Error(
        f"{model.__name__} cannot be cached: its rows are in the table of"
        f" {next(iter(concrete._meta.parents)).__name__}, too.",
        hint="Set cache = False in its ShardMeta. The parent may be cached.",
        obj=model,
        id="sharded_orm.E033",
    )


def _is_declared(model: Any) -> bool:
    meta = model.ShardMeta
    group, name = getattr(meta, "group", None), getattr(meta, "shard_key", None)
    is_key = isinstance(name, str) and field_of(model, name) is not None
    return is_key and group in runtime.topology().groups


def _unmanaged(model: Any) -> Iterator[checks.CheckMessage]:
    if not model._meta.managed:
        yield checks.Warning(
            f"{model.__name__} is cached and not managed: what others write to"
            f" {model._meta.db_table!r} does not reach the cache.",
            hint="Set cache = False; or silence this if only this project writes there.",
            obj=model,
            id="sharded_orm.W034",
        )


def _changed_by_database(model: Any) -> Iterator[checks.CheckMessage]:
    for field in model._meta.local_fields:
        remote = field.remote_field
        if remote is not None and compat.changes_rows_unseen(getattr(remote, "on_delete", None)):
            yield checks.Error(
                f"With on_delete={remote.on_delete.__name__}, the database itself changes rows of the"
                f" cached model {model.__name__}, and the cache does not learn of it.",
                hint="Use CASCADE, SET_NULL or the like, or cache = False.",
                obj=field,
                id="sharded_orm.E075",
            )


def _keys(model: Any) -> Iterator[checks.CheckMessage]:
    options = shard_options(model)
    key = options.key if options is not None else None
    pk = model._meta.pk
    fields: dict[str, list[Any]] = {"shard key": [key] if key is not None else []}
    fields["primary key"] = list(pk.fields) if isinstance(pk, models.CompositePrimaryKey) else [pk]
    if (name := isolate_name(model)) is not None:
        field = field_of(model, name)
        if field is None or field is key:
            what = "the shard key" if field is not None else "no field with a column"
            yield checks.Error(
                f"ShardMeta.isolate_key {name!r} is {what} of {model.__name__}.",
                hint="Name a field of it by which lists are filtered beside the shard key.",
                obj=model,
                id="sharded_orm.E031",
            )
        else:
            fields["isolate key"] = [field]
    collations = collations_of(model)
    seen = set()
    for role, role_fields in fields.items():
        for field in role_fields:
            token = token_field(field, collations)
            if token.exact or field in seen:
                continue
            seen.add(field)
            yield checks.Error(
                f"The {role} {field.name!r} of a cached model: the database takes values for equal"
                " that are written differently, and the cache does not.",
                hint=_remedy(token, collations, role),
                obj=field,
                id="sharded_orm.E032",
            )


def _remedy(field: TokenField, collations: Collations, role: str) -> str:
    if not isinstance(field.target, models.CharField | models.TextField):
        return (
            "Use an integer, text, a date or a UUID, or set cache = False:"
            f" {type(field.target).__name__} has several spellings of one value."
        )
    owner = "" if field.target is field.field else f" of {field.target.model._meta.label}"
    is_shard_key = role == "shard key"
    collation = collations.exact_for_shard_key if is_shard_key else collations.exact_for_cache
    return (
        f"Set db_collation={collation!r} on {field.target.name!r}{owner}, or make it an"
        " ExactCharField, or set cache = False."
    )


def _engine(model: Any) -> Iterator[checks.CheckMessage]:
    alias = router.db_for_write(model)
    engine = connections.settings[alias]["ENGINE"]
    if issubclass(load_backend(engine).DatabaseWrapper, ShardConnectionMixin):
        return
    yield checks.Error(
        f"{model.__name__} is cached, and its database {alias!r} has the ENGINE {engine!r}, which"
        " cannot tell the cache what is about to be committed.",
        hint=f"Use {backend_for(engine)} for {alias!r}, which behaves as Django's own. Or set cache ="
        " False.",
        obj=model,
        id="sharded_orm.E026",
    )


def _isolation(cached: Sequence[Any]) -> Iterator[checks.CheckMessage]:
    places: dict[str, Any] = {}
    for model in cached:
        options = shard_options(model) if _is_readable(model) else None
        if options is not None and options.group in runtime.topology().groups:
            nodes = runtime.topology().nodes
            for part in runtime.group(options.group).ranges:
                places[f"node {part.primary!r}"] = nodes[part.primary]
        elif not issubclass(model, ShardedModel):
            alias = router.db_for_write(model)
            places[f"database {alias!r}"] = connections.settings[alias]
    for place, entry in places.items():
        features = features_of(load_backend(entry["ENGINE"]).DatabaseWrapper)
        level = features.isolation_level(entry.get("OPTIONS", {}))
        if level in _SNAPSHOTS:
            yield checks.Warning(
                f"The isolation level of {place} is {level!r}: inside a transaction nothing is read"
                " from the cache there, as it may be newer than what the transaction may see.",
                hint=f"Use {features.read_committed}; or silence this.",
                id="sharded_orm.W036",
            )
        elif level == "unknown":
            # OPTIONS does not name a level, so the default of the server is in use, which is not
            # known here. On a server that offers READ UNCOMMITTED, it may be this level. The
            # library must assume so, and then no read uses the cache, even outside of transactions.
            where = "" if features.has_read_uncommitted else "inside a transaction "
            yield checks.Warning(
                f"The isolation level of {place} is not in its OPTIONS, so only the server knows it:"
                f" {where}nothing is read from the cache there.",
                hint=f"Set OPTIONS['isolation_level'] to {features.read_committed}; or silence this.",
                id="sharded_orm.W036",
            )


def _is_readable(model: Any) -> bool:
    return issubclass(model, ShardedModel) and _is_declared(model)
