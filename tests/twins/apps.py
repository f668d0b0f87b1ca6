from django.apps import AppConfig


class TwinsConfig(AppConfig):
    name = "tests.twins"
    label = "twins"
