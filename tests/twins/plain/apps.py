from django.apps import AppConfig


class PlainTwinsConfig(AppConfig):
    name = "tests.twins.plain"
    label = "twins_plain"
