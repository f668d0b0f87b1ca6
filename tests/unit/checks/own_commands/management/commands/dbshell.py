from django.core.management.commands import dbshell


class Command(dbshell.Command):
    pass
