from django.apps import AppConfig


class ShardedRelativesConfig(AppConfig):
    name = "tests.relatives.sharded"
    label = "relatives_sharded"
