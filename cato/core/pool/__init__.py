"""Parts of a pool's router, mostly pure rules over plain values."""
