from django.apps import AppConfig


class ShardedTwinsConfig(AppConfig):
    name = "tests.twins.sharded"
    label = "twins_sharded"
