"""The notebooks run from top to bottom, on a buffer like the one that the example makes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import zbuffer

FOLDER = Path(__file__).parent.parent / "notebooks"


def make_buffer(path: Path) -> None:
    schema = {
        "obs": ((84, 84), "uint8"),
        "action": ((), "int64"),
        "reward": ((), "float32"),
        "terminated": ((), "bool"),
        "truncated": ((), "bool"),
    }
    with zbuffer.create(path, schema) as buffer:
        for episode in range(12):
            n = 30 + episode
            obs = np.zeros((n + 1, 84, 84), np.uint8)
            obs[:, 40:44, 40 + episode] = 200
            buffer.add_episode(
                obs=obs,
                action=np.arange(n) % 4,
                reward=np.ones(n, np.float32),
                terminated=True,
            )


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    pytest.importorskip("matplotlib")
    make_buffer(tmp_path / "dqn.zarr")
    monkeypatch.setenv("ZBUFFER_PATH", str(tmp_path / "dqn.zarr"))
    notebook = nbformat.read(path, as_version=4)

    nbclient.NotebookClient(notebook, timeout=120).execute()
