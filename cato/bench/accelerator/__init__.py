"""`cato bench accelerator`: all that only a card can show, in one command."""
