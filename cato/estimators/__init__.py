"""What will a request cost? Pure models, trained on records and asked with values."""
