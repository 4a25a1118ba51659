"""Alembic's folder. A new version is a file in `versions`; a released one never changes."""
