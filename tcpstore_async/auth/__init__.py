"""Authorization: tokens, what they allow, and files with secrets."""
