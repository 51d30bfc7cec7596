"""`nearkin discover` and `nearkin assign`."""
