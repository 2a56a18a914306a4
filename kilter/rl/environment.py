"""What follows an answer that came to a stop: a tool's output, the next question, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kilter.rl.experience import Rollout
from kilter.rl.rewards.config import resolve
from kilter.tokens import Tokenizer

# The tokens that follow, or None where the answer is over.
Environment = Callable[[Rollout], Sequence[int] | None]


def environment_of(path: str | None, tokenizer: Tokenizer, vocab: int) -> Environment | None:
    """The function that a job names, giving tokens; ValueError where it fails.

    Args:
        vocab: of the model, which tokens have to be below.
    """
    if path is None:
        return None
    function = resolve(path)

    def environment(rollout: Rollout) -> Sequence[int] | None:
        try:
            said = function(rollout, tokenizer)
        except Exception as error:
            raise ValueError(f"The environment {path} failed on sample {rollout.id}: "
                             f"{type(error).__name__}: {error}") from error
        if isinstance(said, str):
            return tokenizer.encode(said)
        if said is None or (isinstance(said, Sequence) and not isinstance(said, bytes)
                            and all(isinstance(token, int) for token in said)):
            if bad := [token for token in said or () if not 0 <= token < vocab]:
                raise ValueError(f"The environment {path} answered sample {rollout.id} with the "
                                 f"token id {bad[0]}, but the model has ids from 0 to {vocab - 1}; "
                                 "return a text, or ids of its tokenizer.")
            return said
        raise ValueError(f"The environment {path} answered sample {rollout.id} with {said!r}; "
                         "return a text, a list of token ids, or None to end it.")

    return environment
