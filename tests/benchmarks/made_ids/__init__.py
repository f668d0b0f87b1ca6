"""The application of the models whose ids PostgreSQL makes."""
