"""Experiments against a live Serve application (`cato bench live`)."""
