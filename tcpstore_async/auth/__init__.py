"""Who may do what: tokens, what they allow, and the files that hold secrets."""
