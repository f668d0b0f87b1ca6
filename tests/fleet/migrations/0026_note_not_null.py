from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("fleet", "0025_fill_notes")]

    operations = [
        migrations.AlterField("photo", "note", models.TextField(default="")),
    ]
