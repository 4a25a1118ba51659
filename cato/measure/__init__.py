"""Measuring an engine for its profile, and checking the profile. No Ray here."""
