"""What users hold: the stores."""
