"""The HTTP API: one file per dialect, assembled by `app.create_app`. Does not import Ray."""
