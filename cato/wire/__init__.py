"""Reads and writes the request and response bodies of all API dialects. Pure, except `link`."""
