"""`cato bench accelerator`: all measurements that need a real accelerator, in one command."""
