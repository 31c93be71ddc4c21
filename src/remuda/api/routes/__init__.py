"""One module for each group of routes; `app` puts them together."""
