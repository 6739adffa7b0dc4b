"""The specification in plain Python: slow, obvious, and what the property tests compare the core with."""
