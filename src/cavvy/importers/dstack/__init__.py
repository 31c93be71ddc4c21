"""Check dstack's configurations by the rules of dstack, and translate them."""
