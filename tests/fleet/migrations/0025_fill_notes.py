from django.db import migrations


def fill(apps, schema_editor):
    photos = apps.get_model("fleet", "Photo").objects.using(schema_editor.connection.alias)
    photos.filter(note=None).update(note="none")


class Migration(migrations.Migration):
    dependencies = [("fleet", "0024_photo_user")]

    operations = [
        migrations.RunPython(fill, migrations.RunPython.noop),
    ]
