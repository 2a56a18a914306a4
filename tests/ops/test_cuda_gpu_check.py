"""bench/gpu_check.sh where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu_check.sh"


def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path: Path) -> None:
    run = subprocess.run(
        [SCRIPT], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHON": sys.executable, "OUT": str(tmp_path),
             "CUDA_VISIBLE_DEVICES": ""})
    assert run.returncode == 2
    assert "needs a CUDA GPU" in run.stderr
    assert not list(tmp_path.iterdir())
