"""Published models in numbered, signed versions. The description is in `capability.py`."""
