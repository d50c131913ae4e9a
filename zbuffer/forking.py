"""What an object has to do in a forked child."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any


def call_in_child(method: Callable[[], Any]) -> None:
    """Have a bound method called in every child forked while its object lives."""
    if not hasattr(os, "register_at_fork"):
        return
    reference = weakref.WeakMethod(method)

    def call() -> None:
        bound = reference()
        if bound is not None:
            bound()

    os.register_at_fork(after_in_child=call)
