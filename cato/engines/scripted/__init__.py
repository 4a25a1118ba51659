"""An engine that answers by a script, for the tests of real agents."""
