"""One module for each group of routes, and their shared code; `app` registers them."""
