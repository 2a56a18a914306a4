"""Servers of others beside ours, and the load that all of them get."""
