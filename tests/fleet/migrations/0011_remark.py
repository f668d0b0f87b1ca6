from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("fleet", "0010_photo_file")]

    operations = [
        migrations.RenameModel("Comment", "Remark"),
    ]
