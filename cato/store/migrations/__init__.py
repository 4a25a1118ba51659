"""Alembic's folder. A new version is a file in `versions`; one that was released never changes."""
