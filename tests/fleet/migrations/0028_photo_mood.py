from django.db import migrations, models


def fill(apps, schema_editor):
    photos = apps.get_model("fleet", "Photo").objects.using(schema_editor.connection.alias)
    photos.filter(mood=None).update(mood="calm")


class Migration(migrations.Migration):
    dependencies = [("fleet", "0027_trim_names")]

    operations = [
        migrations.AddField("photo", "mood", models.CharField(max_length=20, null=True)),
        migrations.RunPython(fill, migrations.RunPython.noop),
        migrations.AlterField("photo", "mood", models.CharField(max_length=20)),
    ]
