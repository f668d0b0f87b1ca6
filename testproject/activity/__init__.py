"""What users do on the photo site: entities with two indexes."""
