"""One look at a live registry: what it answers, what is wrong with it, and whether a decode engine fits."""
