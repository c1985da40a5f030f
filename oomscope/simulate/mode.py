"""The dispatch mode: every operation on a simulated tensor is sized and allocated, without arithmetic.

Operations on real CPU tensors run as ever. An operation that involves a simulated tensor, or makes one,
goes straight to `FakeTensorMode.dispatch`, which works out shapes; the mode itself is never active, so that
CPU tensors, data loaders and numpy stay real.
"""

from __future__ import annotations

import logging
import math
import sys
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from . import accumulate
from .device import Device
from .fallback import run_on_host
from .infer import Inference
from .ops import (  # noqa: F401  # they register kernels
    attention,
    native,
    networks,
    normalisation,
    recurrent,
    shapes,
    transfers,
    vision,
    workspaces,
)
from .ops.registry import Info
from .tracker import Tracker
from .values import Values

aten = torch.ops.aten
fake_tensor.log.setLevel(logging.CRITICAL)  # what it logs is raised as well
_active_mode = torch._C._get_dispatch_mode
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_PRIM_DEVICE = torch.ops.prim.device.default
_PLAIN, _SIMULATED, _FOREIGN = 1, 2, 3
_VIRTUAL_BYTES = 256 << 10
"""CPU tensors above this size made while a module is constructed hold no memory.

Their values are not needed.
"""
_VIRTUAL_DEPTH = 80
_FACTORIES = {
    aten.empty.memory_format: 0,
    aten.zeros.default: 0,
    aten.ones.default: 0,
    aten.rand.default: 0,
    aten.randn.default: 0,
    aten.full.default: 0,
    aten.empty_strided.default: 0,
    aten.randint.default: 1,
    aten.randint.low: 2,
    aten.normal.float_float: 2,
}
"""Operation -> position of its size."""


class UnsupportedOperation(NotImplementedError):
    """The script needs an operation whose output shape nobody has told torch."""


class SimulatedMode(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed
    """Simulates the operations of the threads in which it is active."""

    supports_higher_order_operators = True

    def __init__(self, device: Device, tracker: Tracker) -> None:
        super().__init__()
        self.device = device
        self.tracker = tracker
        self.values = Values()
        _never_touch_a_driver()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.fake.cache_enabled = False  # ours is cheaper
        self._inference = Inference(self.fake, device)
        self.host_limit = 64 << 20
        """Bytes up to which a copy of unknown values to the host is a real tensor."""
        self.operations = 0
        self.unsupported: dict[str, int] = {}
        self.workspaces: dict[Any, Any] = {}
        self.attention: dict[int, int] = {}
        self.adds_in_place = False
        """Whether additions now write into their first input, though torch does them out of place here."""
        self.convolution_bound = 0
        self.convolution_factor = 0.0
        self.cudnn_enabled = True
        """`torch.backends.cudnn.enabled`"""
        self.compiled = 0
        """How often the script asked for compilation, which is not done."""
        self.streams: Any = None
        self.next_category: str | None = None
        """Category of the outputs of the running operation, set by its kernel."""
        self._held: list[Any] = []
        self._infos: dict[Any, Info] = {}
        self._kinds: dict[type, int] = {
            torch.Tensor: _PLAIN,
            torch.nn.Parameter: _PLAIN,
            FakeTensor: _SIMULATED,
        }
        attention.install(self)
        native.install(self)
        networks.install(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # saves a wrapper around every operation; nothing is compiled on the simulated device

    # --- which operations are simulated

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _PRIM_DEVICE:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        if _active_mode(_FAKE) is not None:
            # Somebody else's fake tensors: DTensor works out shapes of whole tensors that no card ever holds.
            return func(*args, **kwargs)
        simulated = False
        for each in types:
            kind = self._kinds.get(each) or self._kind(each)
            if kind == _FOREIGN:
                return NotImplemented
            if kind == _SIMULATED:
                simulated = True
        if not simulated:
            device = kwargs.get("device")
            if (
                device is None
                or (device.type if isinstance(device, torch.device) else str(device)[:4]) != "cuda"
            ):
                if not isinstance(func, torch._ops.HigherOrderOperator):
                    return self._on_host(func, types, args, kwargs)
                if not any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves((args, kwargs))):
                    return func(*args, **kwargs)
        try:
            return self.simulate(func, args, kwargs)
        except (torch.OutOfMemoryError, UnsupportedOperation) as error:
            raise error.with_traceback(None) from None  # the way through here tells the user nothing

    def _kind(self, tensor_type: type) -> int:
        kind = _PLAIN
        if issubclass(tensor_type, FakeTensor):
            kind = _SIMULATED
        elif hasattr(tensor_type, "__tensor_flatten__") or tensor_type.__name__ in (
            "AsyncCollectiveTensor",
            "DTensor",
        ):
            kind = _FOREIGN  # wrappers first take themselves apart
        self._kinds[tensor_type] = kind
        return kind

    def _on_host(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if not types and func in _FACTORIES and self._is_virtual(func, args, kwargs):
            with self.fake:
                return func(*args, **kwargs)
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}  # pinning needs a driver
        info = self._infos.get(func) or self._learn(func)
        if info.on_host and info.kernel is not None:
            out = info.kernel(self, func, args, kwargs)
            if out is not NotImplemented:
                return out
        return func(*args, **kwargs)

    @staticmethod
    def _is_virtual(func: Any, args: Any, kwargs: Any) -> bool:
        """Whether a large CPU tensor is made by the constructor of a module."""
        device = kwargs.get("device")
        if device is not None and torch.device(device).type != "cpu":
            return False
        position = _FACTORIES[func]
        size = args[position] if position < len(args) else kwargs.get("size")
        if not isinstance(size, (list, tuple)) or math.prod(size) * 4 < _VIRTUAL_BYTES:
            return False
        frame: Any = sys._getframe(3)
        for _ in range(_VIRTUAL_DEPTH):
            if frame is None:
                return False
            if frame.f_code.co_name in ("__init__", "reset_parameters") and isinstance(
                frame.f_locals.get("self"), torch.nn.Module
            ):
                return True
            frame = frame.f_back
        return False

    # --- one operation

    def infer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Outputs of `func` as simulated tensors, without allocating them.

        Raises:
            UnsupportedOperation: torch knows no fake kernel for it.
        """
        problem: Exception | None = None
        try:
            out = self._inference(self._infos.get(func) or self._learn(func), func, args, kwargs)
        except (
            fake_tensor.UnsupportedOperatorException,
            fake_tensor.DynamicOutputShapeException,
            fake_tensor.DataDependentOutputException,
            fake_tensor.UnsupportedFakeTensorException,
            NotImplementedError,
        ) as unknown:
            problem = unknown
            out = NotImplemented
        if out is NotImplemented:
            out = run_on_host(self, func, args, kwargs)
        if out is NotImplemented:
            raise self._unsupported(func) from problem
        return out

    def hold(self, tensors: list[Any]) -> None:
        """Allocate temporaries of the running operation; they are freed when it ends."""
        for tensor in tensors:
            if tensor.fake_device.type == "cuda":
                self.tracker.track(tensor)
        self._held.extend(tensors)

    def simulate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Do one operation on simulated tensors."""
        info = self._infos.get(func) or self._learn(func)
        self.operations += 1
        if not info.is_plain:
            return self._higher_order(func, args, kwargs)
        out = NotImplemented
        if info.kernel is not None:
            out = info.kernel(self, func, args, kwargs)
        if out is NotImplemented:
            if info.is_composite:
                with self:
                    out = func.decompose(*args, **kwargs)
                if out is not NotImplemented:
                    return out
            out = self.infer(func, args, kwargs)
        self._account(info, func, args, kwargs, out)
        return out

    def _higher_order(self, func: Any, args: Any, kwargs: Any) -> Any:
        with self.fake:
            out = func(*args, **kwargs)
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, FakeTensor) and leaf.fake_device.type == "cuda":
                self.tracker.track(leaf)
        return out

    def _account(self, info: Info, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Allocate outputs and the kernel's own memory, and carry known values along."""
        if isinstance(out, FakeTensor):
            outs = [out]
        elif isinstance(out, (tuple, list)):
            outs = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, FakeTensor)]
        else:
            outs = []
        tracker = self.tracker
        if not info.is_view and outs:
            if not (info.may_be_in_place and accumulate.is_in_place(self, func, args, kwargs, outs[0])):
                self._allocate(outs)
            if info.workspace is not None and outs[0].fake_device.type == "cuda":
                sizes = info.workspace(self, func, args, kwargs, outs)
                if sizes:
                    tracker.borrow(sizes, outs[0].fake_device.index or 0)
        if self._held:
            self._held.clear()
        self.values.propagate(info, func, args, kwargs, outs)

    def _allocate(self, outs: list[Any]) -> None:
        """Memory for the outputs of the running operation."""
        tracker = self.tracker
        category, self.next_category = self.next_category, None
        before = tracker.hint
        if category is not None:
            tracker.hint = before or category
        try:
            for each in outs:
                if each.fake_device.type == "cuda":
                    tracker.track(each)
        finally:
            tracker.hint = before

    def _learn(self, func: Any) -> Info:
        info = self._infos[func] = Info(func)
        return info

    def _unsupported(self, func: Any) -> UnsupportedOperation:
        name = str(func)
        self.unsupported[name] = self.unsupported.get(name, 0) + 1
        frames = self.tracker.stacks.frames(self.tracker.stacks.take(sys._getframe(2)))
        user = next((frame for frame in frames if f"{torch.__name__}/" not in frame["filename"]), None)
        place = f" ({user['filename']}:{user['line']})" if user else ""
        return UnsupportedOperation(
            f"the simulated device cannot run {name}{place}: torch knows no fake kernel for it. "
            "Register one with torch.library.register_fake, or run on a real GPU."
        )


def _never_touch_a_driver() -> None:
    FakeTensorMode.avoid_device_init = property(lambda _self: True)
    fake_tensor.init_gpu_context = lambda _device: None
    torch._C._set_only_lift_cpu_tensors(True)
