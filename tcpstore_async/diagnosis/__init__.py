"""What follows from the facts that a server hands out: who is missing, and which keys are nearly those waited for."""
