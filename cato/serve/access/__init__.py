"""Access control: keys, sign-in, tenant limits, usage, and superseded editor requests."""
