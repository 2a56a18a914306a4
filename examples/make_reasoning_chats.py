"""Writes questions and answers of a reasoning-gym task, one JSON object per line.

    python examples/make_reasoning_chats.py chain_sum sums.jsonl --size 2000

Each line is {"messages": [{"role": "user", ...}, {"role": "assistant", ...}]}, as a data source
with chat = true reads it. With --pairs it is {"prompt": ..., "chosen": ..., "rejected": ...}, the
right answer and another question's, for a source with pairs = true. Needs the package
reasoning-gym.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path


def write_chats(task: str, out: Path, size: int, seed: int, system: str = "", pairs: bool = False
                ) -> None:
    """Raises ValueError for a task that reasoning-gym does not have."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise ValueError(f"reasoning-gym has no task {task}; it has {', '.join(sorted(DATASETS))}.")
    start = [{"role": "system", "content": system}] if system else []
    new = out.with_name(f".{out.name}.new")
    with open(new, "w", encoding="utf-8") as file:
        entries = list(reasoning_gym.create_dataset(task, size=size, seed=seed))
        for i, entry in enumerate(entries):
            prompt = [*start, {"role": "user", "content": entry["question"]}]
            row = {"messages": [*prompt, {"role": "assistant", "content": entry["answer"]}]}
            if pairs:
                wrong = next((other["answer"] for other in entries[i + 1:] + entries[:i]
                              if other["answer"] != entry["answer"]), None)
                if wrong is None:
                    raise ValueError(f"All {size} answers of {task} are the same, so none is "
                                     "wrong; ask for more.")
                row = {"prompt": prompt, "chosen": entry["answer"], "rejected": wrong}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    new.replace(out)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("task", help="a reasoning-gym task: chain_sum, gcd, spell_backward, ...")
    parser.add_argument("out", type=Path, help="the .jsonl file to write")
    parser.add_argument("--size", type=int, default=1000, help="conversations (default 1000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--system", default="", help="a system message before each question")
    parser.add_argument("--pairs", action="store_true",
                        help="write pairs of a right and a wrong answer")
    given = parser.parse_args(arguments)
    try:
        write_chats(given.task, given.out, given.size, given.seed, given.system, given.pairs)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except ImportError:
        print("This needs reasoning-gym: pip install reasoning-gym", file=sys.stderr)
        return 2
    what = "pairs" if given.pairs else "conversations"
    print(f"{given.out}: {given.size} {what} of {given.task}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
