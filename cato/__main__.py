"""`python -m cato`: the command line."""

from cato.cli import main

main()
