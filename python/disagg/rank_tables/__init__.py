"""What `disagg map` shows: the mapping of a pair of engines, from both sides, as text, JSON and a drawing."""
