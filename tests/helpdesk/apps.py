from django.apps import AppConfig


class HelpdeskConfig(AppConfig):
    name = "tests.helpdesk"
    label = "helpdesk"
