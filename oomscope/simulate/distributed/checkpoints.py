"""`torch.distributed.checkpoint`: each simulated rank saves and loads its own part, without asking the others.

The plan of a whole checkpoint is made from the plans of all ranks, and most of them are not there.
"""

from __future__ import annotations

from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

from ...agent.patching import AfterImport

_modules = AfterImport()


def install() -> None:
    """Change the three places once the package is imported, if ever."""
    _modules.when("torch.distributed.checkpoint.utils", _each_for_itself)
    _modules.when("torch.distributed.checkpoint.default_planner", _accept_parts)
    _modules.when("torch.distributed.checkpoint._state_dict_stager", _stage_by_copying)


def _each_for_itself(module: Any) -> None:
    wrapper = module._DistWrapper
    plain = wrapper.__init__

    def init(self: Any, group: Any, use_dist: bool, coordinator_rank: int) -> None:
        plain(self, None, False, 0)

    wrapper.__init__ = init


def _accept_parts(module: Any) -> None:
    module._validate_global_plan = lambda *_plan: []


def _stage_by_copying(module: Any) -> None:
    """For asynchronous saving, storages are copied to the host; simulated tensors are, as they have none."""
    stager = module.StateDictStager
    plain = stager._offload_tensor

    def offload(self: Any, x: Any, memo: Any, non_blocking: bool = False) -> Any:
        if not isinstance(x, FakeTensor):
            return plain(self, x, memo, non_blocking)
        memo[id(x)] = copied = x.detach().to("cpu")
        return copied

    stager._offload_tensor = offload
