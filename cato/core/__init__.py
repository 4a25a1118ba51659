"""The pure core: values, events, commands and the objects that decide. Standard library only."""
