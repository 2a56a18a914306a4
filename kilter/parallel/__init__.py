"""How work is spread over ranks: tables of placements, applied to a plain model from outside."""
