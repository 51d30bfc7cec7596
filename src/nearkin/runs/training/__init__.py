"""`nearkin train`, and everything that is written on the way."""
