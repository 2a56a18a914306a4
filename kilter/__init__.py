"""Kilter: a language model's whole life from one model definition."""

__version__ = "0.1.0"
