"""`cato bench accelerator`: measurements that need a real accelerator, in one command."""
