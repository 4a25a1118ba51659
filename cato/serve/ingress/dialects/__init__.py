"""One dialect a file: its routes, and what it calls its own."""
