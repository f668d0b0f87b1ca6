"""The metaclass of sharded models. It installs what they have instead of Django's parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.apps import apps
from django.db.models import Model
from django.db.models.base import ModelBase

from sharded_orm.models.relations.descriptors import install_descriptors
from sharded_orm.models.relations.forms import install_relations_in_forms
from sharded_orm.models.relations.order import install_order
from sharded_orm.models.relations.through import install_through
from sharded_orm.models.sharding.key_validation import install_key_validation

#: Functions that are called with a sharded model when a relation was added to it after the class was
#: made. (The module of generic relations adds one.)
installers_of_relations: list[Callable[[type[Model]], None]] = [
    install_descriptors,
    install_through,
    install_relations_in_forms,
]


class ShardedModelBase(ModelBase):
    """The metaclass of sharded models.

    It installs this library's descriptors and managers, instead of Django's, for the relations and
    the automatic many-to-many tables of a model. It also makes the model's forms and serializers
    report an error if somebody changes the shard key of a stored row.
    """

    def __new__(
        mcs, name: str, bases: tuple[type, ...], attrs: dict[str, Any], **kwargs: Any
    ) -> Any:
        if "ShardMeta" in attrs:
            for config in apps.get_app_configs():
                # An installed app may add fields to each class that has a ShardMeta. Its AppConfig
                # then has a method fields_of_sharded_model().
                if (fields_of := getattr(config, "fields_of_sharded_model", None)) is not None:
                    attrs = {**attrs, **fields_of(name, attrs)}
        cls: Any = super().__new__(mcs, name, bases, attrs, **kwargs)
        if not cls._meta.abstract:
            install_descriptors(cls)
            install_through(cls)
            install_key_validation(cls)
            install_relations_in_forms(cls)
            install_order(cls)
            cls._are_relations_installed = True
        return cls

    def __setattr__(cls, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        # A package may add a relation to a finished model, by add_to_class() or
        # contribute_to_class(). Django then sets a descriptor of its own on the class.
        if "_are_relations_installed" in cls.__dict__ and _is_from_django(type(value)):
            for install in installers_of_relations:
                install(cls)  # type: ignore[arg-type]  # each class of this metaclass is a model


def _is_from_django(descriptor: type) -> bool:
    return hasattr(descriptor, "__get__") and descriptor.__module__.startswith("django.")
