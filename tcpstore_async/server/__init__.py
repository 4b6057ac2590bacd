"""The servers: two that differ in how they move bytes, and what starts them for a master."""
