from django.apps import AppConfig


class PlainRelativesConfig(AppConfig):
    name = "tests.relatives.plain"
    label = "relatives_plain"
