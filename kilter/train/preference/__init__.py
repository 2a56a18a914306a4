"""Training on pairs of answers: reward models and DPO (docs/preference.md).

    losses      pure functions of what a model says of P pairs
    objective   the loss of a step's pairs, as `kilter.train.step` takes it
    reference   what the starting model says of all pairs, computed once
"""
