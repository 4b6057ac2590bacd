"""What everything rests on: errors, limits, addresses, deadlines, and how arguments are converted."""
