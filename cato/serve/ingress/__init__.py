"""The HTTP interface: one file a dialect; `app.create_app` puts them together. No Ray here."""
