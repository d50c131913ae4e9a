"""Build the optional C extension against the libblosc2.a that the blosc2 wheel ships."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import Extension, setup


def extensions() -> list[Extension]:
    """Return the gather extension, or nothing where it cannot be built."""
    if os.name != "posix" or os.environ.get("ZBUFFER_NO_EXTENSION"):
        return []
    try:
        import blosc2
    except ImportError:
        return []
    home = Path(blosc2.__file__).parent
    archive = home / "lib" / "libblosc2.a"
    if not archive.exists():
        return []
    link = ["-pthread"]
    if sys.platform == "linux":
        # Keep the archive's symbols to ourselves: python-blosc2 and others in
        # the process carry copies of the same library.
        link += ["-Wl,--exclude-libs,ALL", "-ldl", "-lm", "-lrt"]
    return [
        Extension(
            "zbuffer.reading._gather",
            [
                f"zbuffer/reading/{name}.c"
                for name in ("_gather", "_plan", "_windows", "_encode", "_map")
            ],
            depends=["zbuffer/reading/_native.h"],
            include_dirs=[str(home / "include")],
            extra_objects=[str(archive)],
            extra_compile_args=["-O2", "-std=c11", "-fvisibility=hidden", "-pthread", "-Wall"],
            extra_link_args=link,
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
            optional=True,
        )
    ]


setup(
    ext_modules=extensions(),
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
