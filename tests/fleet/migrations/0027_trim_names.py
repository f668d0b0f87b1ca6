from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("fleet", "0026_note_not_null")]

    operations = [
        migrations.RunSQL(
            [
                "UPDATE fleet_album SET name = TRIM(name)",
                ("UPDATE fleet_photo SET title = %s WHERE title = ''", ["untitled"]),
            ],
            migrations.RunSQL.noop,
        ),
    ]
