"""Programs of operators and benchmarkers. Nothing outside imports them: they are found by name."""
