"""The extension finds the same windows as NumPy, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zbuffer
from zbuffer.reading.gather import native_module

pytestmark = pytest.mark.skipif(native_module() is None, reason="the C extension is not built")


def fields(reward: str) -> dict[str, Any]:
    return {
        "obs": ((2,), "int16"),
        "reward": ((), reward),
        "terminated": ((), "bool"),
        "truncated": ((), "bool"),
    }


@settings(max_examples=60, deadline=None)
@given(
    lanes=st.integers(1, 3),
    reward=st.sampled_from(["float32", "float64", "int16", "float16"]),
    plan=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["no"] * 5 + ["end", "cut"])), min_size=1
    ),
    seed=st.integers(0, 9),
    stack=st.sampled_from([None, 1, 2, 5]),
    n_step=st.integers(1, 5),
    state=st.sampled_from(["open", "flushed", "closed"]),
    with_next=st.booleans(),
)
def test_both_find_the_same_windows(
    tmp_path_factory: Any,
    lanes: int,
    reward: str,
    plan: Any,
    seed: int,
    stack: int | None,
    n_step: int,
    state: str,
    with_next: bool,
) -> None:
    path = tmp_path_factory.mktemp("w") / "b"
    options: dict[str, Any] = {"lanes": lanes, "segment_rows": 4} if lanes > 1 else {}
    rng = np.random.default_rng(seed)
    number = 0
    with zbuffer.create(path, fields(reward), chunk_rows=8, capacity=40, **options) as buffer:
        for skip, what in plan * 3:
            chosen = [lane for lane in range(lanes) if lanes == 1 or lane != skip]
            n = len(chosen)
            row: dict[str, Any] = {
                "obs": np.full((n, 2), number, np.int16),
                "reward": rng.integers(-3, 4, n).astype(reward),
                "terminated": np.full(n, what == "end" and number % 2 == 0),
                "truncated": np.full(n, what == "end" and number % 2 == 1),
            }
            if with_next and what == "end":
                row["next_obs"] = np.full((n, 2), number + 1, np.int16)
            if lanes == 1:
                buffer.append(**{name: value[0] for name, value in row.items()})
                if what == "cut":
                    buffer.end_episode()
            else:
                buffer.append(**row, lanes=chosen)
                if what == "cut":
                    buffer.end_episode(lanes=chosen)
            number += 1
        if state == "flushed":
            buffer.flush()
        if state == "closed":
            buffer.close()
        while True:
            found, firsts = [], []
            for gather in ("native", "ctypes"):
                with zbuffer.open(path, gather=gather) as reader:  # type: ignore[arg-type]  # a name
                    firsts.append(reader.first_row)
                    try:
                        found.append(
                            reader.sample(
                                50, frame_stack=stack, n_step=n_step, gamma=0.9, seed=seed
                            )
                        )
                    except zbuffer.SampleError as error:
                        found.append(str(error))  # type: ignore[arg-type]  # compared all the same
                    firsts.append(reader.first_row)
            # Rows may be evicted between one look and the next.
            if len(set(firsts)) == 1:
                break

    native, plain = found
    if isinstance(plain, str):
        assert native == plain
        return
    assert native.keys() == plain.keys()
    for name in plain:
        assert native[name].dtype == plain[name].dtype
        np.testing.assert_array_equal(native[name], plain[name], err_msg=name)
