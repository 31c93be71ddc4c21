"""One module for each group of routes, and what they share; `app` puts them together."""
