"""AMD GPUs for oomscope: a collector over amdsmi, registered in the group `oomscope.collectors`."""

from __future__ import annotations

from oomscope_rocm.collector import RocmCollector

__all__ = ["RocmCollector"]
