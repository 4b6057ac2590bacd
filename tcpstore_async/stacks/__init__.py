"""What processes do: looked at from outside, and told by a responder in them."""
