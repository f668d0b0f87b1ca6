from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("photos", "0002_tags_and_written_comments")]

    operations = [migrations.DeleteModel(name="PhotoOwner")]
