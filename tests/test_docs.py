"""The code in the README and the docs runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


@pytest.mark.parametrize("page", ["README.md"])
def test_code_blocks_run(page: str, tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    pytest.importorskip("torch")

    for block in blocks(page):
        done = subprocess.run(
            [sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


def test_the_page_on_sampling_runs_from_top_to_bottom(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks("docs/sampling.md"))],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
