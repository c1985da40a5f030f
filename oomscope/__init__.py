"""oomscope: what filled the GPU, what to change, and the proof that it worked."""

__version__ = "0.1.0"
