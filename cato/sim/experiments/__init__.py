"""Experiments as commands; one file each, `registry` maps names to them."""
