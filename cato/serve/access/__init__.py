"""Who may ask for what, how much of it, and which request takes the place of which."""
