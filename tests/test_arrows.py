"""The import arrows of the design: each room imports only the rooms below it.

Imports are read from the source with `ast`, function bodies included, so that a lazy import
cannot hide a wrong arrow.
"""

from __future__ import annotations

import ast
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "kilter"

# room -> rooms it may import, beside itself. Modules directly in kilter/ are rooms of one file.
ARROWS: dict[str, set[str]] = {
    "home": set(),
    "ops": {"home"},
    "tokens": set(),
    "report": set(),
    "models": {"ops"},
    "weights": {"models", "ops", "tokens", "home"},
    "comm": {"ops"},
    "mesh": {"comm", "models"},
    "parallel": {"models", "weights", "mesh", "comm", "ops"},
    "train": {"home", "job", "parallel", "weights", "tokens", "models", "mesh", "comm", "ops",
              "report"},
    "serve": {"parallel", "models", "weights", "tokens", "mesh", "comm", "ops", "report"},
    "rl": {"train", "serve", "parallel", "weights", "tokens", "models", "mesh", "comm", "ops",
           "report", "job"},
    "job": set(),
    "verbs": {"models", "weights", "tokens", "ops", "serve", "report", "job", "train", "parallel",
              "mesh", "comm", "rl"},
    "cli": {"verbs"},
    "__init__": {"serve"},  # the public names, lazily
    "__main__": {"cli"},
}

# What kilter/ may import beside the standard library; transformers and gguf are test oracles, so
# they are not here. Three packages need not be installed, and only one place each may ask for them.
OUTSIDE = {"torch", "numpy", "safetensors", "tokenizers", "jinja2", "rich", "triton",
           "huggingface_hub", "llguidance", "fastapi", "starlette", "uvicorn", "httptools",
           "pydantic", "prometheus_client", "pyarrow", "tensorboard", "math_verify",
           "reasoning_gym", "ray"}
ONLY_IN = {"triton": "ops/cuda/", "huggingface_hub": "weights/pull.py",
           "llguidance": "serve/", "fastapi": "serve/server/", "starlette": "serve/server/",
           "uvicorn": "", "pydantic": "serve/server/", "prometheus_client": "serve/server/",
           "pyarrow": "train/data/", "tensorboard": "train/",
           "math_verify": "rl/rewards/jail.py", "reasoning_gym": "rl/", "ray": "rl/"}
# These run before it is known what a command needs: nothing heavy at module level.
INSTANT = ("__init__.py", "__main__.py", "cli.py", "verbs/", "report/")


def imports_of(path: Path, package: str) -> list[tuple[str, bool]]:
    """(dotted module, at module level) of every import in a file; `package` is the dotted package
    that holds it. Imports under ``if TYPE_CHECKING`` never run and are no arrows at run time, but
    they are at reading time, so they count as lazy ones."""
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, top: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend((alias.name, top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[:len(parents) - node.level + 1], *filter(None, [base])])
            # `from kilter import ops` imports kilter.ops
            found.extend((f"{base}.{a.name}" if base == "kilter" else base, top)
                         for a in node.names)
        else:
            lazy = (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                    or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)))
            for child in ast.iter_child_nodes(node):
                visit(child, top and not lazy)

    visit(ast.parse(path.read_text(encoding="utf-8"), str(path)), True)
    return found


def problems_of(root: Path) -> list[str]:
    """Every wrong import below `root` (a folder laid out like kilter/), as sentences."""
    problems = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root).as_posix()
        room = relative.split("/")[0].removesuffix(".py")
        package = ".".join(["kilter", *Path(relative).parts[:-1]])
        if room != "__init__" and room not in ARROWS:
            problems.append(f"{relative} is in a room that has no arrows yet.")
            continue
        for module, top in imports_of(path, package):
            first, *rest = module.split(".")
            if first == "kilter":
                target = rest[0] if rest else ""
                if target in ARROWS and target != room and target not in ARROWS.get(room, set()):
                    problems.append(f"{relative} imports {module}: {room} may not know {target}.")
            elif first not in sys.stdlib_module_names:
                if first not in OUTSIDE or not relative.startswith(ONLY_IN.get(first, "")):
                    problems.append(f"{relative} imports {first}.")
                elif top and relative.startswith(INSTANT):
                    problems.append(f"{relative} imports {first} before it is needed.")
    return problems


def test_arrows_hold() -> None:
    assert problems_of(ROOT) == []


def test_arrows_have_no_cycle() -> None:
    TopologicalSorter(ARROWS).prepare()
    with pytest.raises(CycleError):
        TopologicalSorter({**ARROWS, "ops": {"weights"}}).prepare()


def test_serving_never_knows_training() -> None:
    assert "train" not in ARROWS["serve"]


def test_wrong_arrows_are_found(tmp_path: Path) -> None:
    tree = {
        "ops/a.py": "from kilter.models.spec import ModelSpec\n",
        "ops/b.py": "def f() -> None:\n    import kilter.weights.bridge\n",
        "models/c.py": "from ..serve import engine\n",
        "serve/d.py": "from kilter import verbs\n",
        "weights/e.py": "if True:\n    import transformers\n",
        "models/f.py": "import triton\n",
        "ops/cuda/g.py": "import triton.language as tl\n",  # the one allowed place
        "cli.py": "import torch\n",
        "verbs/h.py": "def run() -> None:\n    import torch\n",  # lazy: allowed
        "plan/i.py": "",
        "tokens/j.py": "from . import chat\nimport json\n",  # its own room: allowed
    }
    for name, text in tree.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    guilty = sorted(problem.split()[0] for problem in problems_of(tmp_path))
    assert guilty == ["cli.py", "models/c.py", "models/f.py", "ops/a.py", "ops/b.py",
                      "plan/i.py", "serve/d.py", "weights/e.py"]
