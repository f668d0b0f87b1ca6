from sharded_orm.management.commands import flush


class Command(flush.Command):
    pass
