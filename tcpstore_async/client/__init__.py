"""Client doors."""
