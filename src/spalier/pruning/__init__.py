"""Take channels out of a network physically, and prove that nothing else has changed."""
