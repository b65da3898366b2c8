"""maxmoe."""
