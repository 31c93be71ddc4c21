"""Commands of `cavvy server` that move, back up, restore and set up a whole server."""
