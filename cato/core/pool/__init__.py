"""Parts of a pool's router, each a pure rule over plain values."""
