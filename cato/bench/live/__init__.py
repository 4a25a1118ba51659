"""`cato bench live`: the simulator's experiments against a live Serve application."""
