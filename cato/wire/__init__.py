"""What stands in the bodies of every dialect: one place that writes it and reads it. Pure."""
