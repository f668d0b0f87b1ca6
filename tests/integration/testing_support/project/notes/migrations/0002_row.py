from django.db import migrations


def add_row(apps, schema_editor):
    note = apps.get_model("notes", "Note")
    note.objects.using(schema_editor.connection.alias).create(owner=-1, text="from a migration")


class Migration(migrations.Migration):
    dependencies = [("notes", "0001_initial")]

    operations = [
        # The hint says for which model this is: it runs on the shards of that model.
        migrations.RunPython(add_row, migrations.RunPython.noop, hints={"model_name": "note"}),
    ]
