"""Server doors."""
