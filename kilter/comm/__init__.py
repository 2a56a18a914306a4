"""Collectives as we call them: over an `Axis`, deterministic, with and without gradients."""
