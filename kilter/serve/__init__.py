"""Serving: the engine that answers many requests at once, and what it is made of."""
