"""Context parallelism: ranks that have rows of the same sequences, and attention over all of them.

`spread_batch` is the way in; docs/long-context.md tells methods and placements apart.
"""
