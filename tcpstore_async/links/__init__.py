"""Links: sessions that outlive a connection, and many sessions over one connection."""
