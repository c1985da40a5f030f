"""A stand-in for libnvidia-ml.so.1 whose GPUs a test describes.

`FakeNvml` compiles a C library once (a compiler is needed: `compiler()` says whether there is one) and keeps
its state in a mapped file, so a test can change a GPU while a reader runs. `PureLib` needs no compiler and
works in one process.
"""

from .driver import FakeNvml, NoCompilerError, compiler, from_scenario, load_scenario
from .pure import PureLib

__all__ = ["FakeNvml", "NoCompilerError", "PureLib", "compiler", "from_scenario", "load_scenario"]
