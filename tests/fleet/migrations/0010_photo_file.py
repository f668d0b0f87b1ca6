from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("fleet", "0009_comment")]

    operations = [
        migrations.RenameField("photo", "path", "file"),
    ]
