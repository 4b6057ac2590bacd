"""Foundations: errors, limits, addresses, deadlines, conversion of arguments."""
