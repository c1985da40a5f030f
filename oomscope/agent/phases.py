"""Phases and modules, for simulated devices, later attempts and `--detail`.

Forward, eval, data, and what is being called.

`nn.Module.__call__` is replaced rather than hooked with torch's global module hooks: 0.2 µs a call instead of
1.2, and `torch.compile` keeps its graphs (the wrapper steps aside while Dynamo traces).
"""

from __future__ import annotations

import weakref
from typing import Any, Callable

from .guard import OFF, failed, guarded
from .patching import AfterImport, Patches
from .probes import Progress, StepProbe
from .readings import DeviceMemory


class ModuleProbe:
    """Knows the stack of running modules, the outermost one, and how many input elements it got.

    Attributes:
        stack: the modules that run now, outermost first (training thread).
        autocast: whether an outermost call ran under autocast.
    """

    def __init__(
        self,
        torch: Any,
        progress: Progress,
        steps: StepProbe,
        device: DeviceMemory,
        emit: Callable[[dict[str, Any]], None],
        *,
        on_first_use: Callable[[], None],
        every_phase: bool,
    ) -> None:
        self.stack: list[Any] = []
        self._root: Callable[[], Any] = lambda: None
        self.autocast = False
        self._torch = torch
        self._progress = progress
        self._steps = steps
        self._emit = emit
        self._on_first_use = on_first_use
        self._every_phase = every_phase
        self._device = device
        self._sizes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._input_numel = 0
        self._saw_input = False
        self._peaks: dict[str, int] = {}

    def install(self, patches: Patches, after_import: AfterImport) -> None:
        """Arm the hooks."""
        self._progress.watch = self._phase_changes
        self._patch_call(patches)
        after_import.when("torch.utils.data.dataloader", lambda module: self._patch_loader(patches, module))

    @property
    def root(self) -> Any:
        """The model; None before it was called, and when the script has let it go: nothing here keeps it alive."""
        return self._root()

    def take_input_numel(self) -> int | None:
        """Elements of the tensors given to outermost modules since the last call; None when none ran."""
        numel, saw = self._input_numel, self._saw_input
        self._input_numel, self._saw_input = 0, False
        return numel if saw else None

    def module_path(self) -> str:
        """Dotted class names of the running modules, outermost first; "" outside."""
        return ".".join(type(module).__name__ for module in self.stack)

    def _patch_call(self, patches: Patches) -> None:
        module = self._torch.nn.Module
        inner = module.__call__
        stack = self.stack
        graph_task = self._torch._C._current_graph_task_id
        is_compiling = self._torch.compiler.is_compiling
        enter = self._enter_root
        leave = self._leave_root

        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            if is_compiling():
                return inner(self, *args, **kwargs)
            if stack or graph_task() != -1:  # inside another module, or recomputed during backward
                stack.append(self)
                try:
                    return inner(self, *args, **kwargs)
                finally:
                    stack.pop()
            before = enter(self, args, kwargs)
            stack.append(self)
            try:
                return inner(self, *args, **kwargs)
            finally:
                stack.pop()
                leave(before)

        patches.attribute(module, "__call__", __call__)

    def _enter_root(self, module: Any, args: Any, kwargs: Any) -> str:
        before = self._progress.phase
        if "modules" in OFF:
            return before
        try:
            torch = self._torch
            training = torch.is_grad_enabled() and module.training
            # A loss module called on its own is an outermost call too, but it is not the model.
            root = self.root
            if training and (root is None or root is module or self._size(module) > self._size(root)):
                if root is None:
                    self._on_first_use()
                if root is not module:
                    self._root = weakref.ref(module)
                self.autocast = self.autocast or _autocast_enabled(torch)
                self._input_numel += _numel(torch, args) + _numel(torch, kwargs)
                self._saw_input = True
            self._steps.note_low()
            self._progress.enter("forward" if training else "eval")
        except Exception:  # noqa: BLE001  # the agent guard, inlined: this path runs at every call
            failed("modules")
        return before

    def _leave_root(self, before: str) -> None:
        # What follows the model in training is its loss: that is forward work, until backward begins.
        if not (before == "other" and self._progress.phase == "forward"):
            self._progress.enter(before)

    def _patch_loader(self, patches: Patches, module: Any) -> None:
        iterator = getattr(module, "_BaseDataLoaderIter", None)
        if iterator is None:
            return
        inner = iterator.__next__
        probe = self

        def __next__(self: Any) -> Any:  # noqa: N807
            before = probe._progress.enter("data")
            try:
                return inner(self)
            finally:
                probe._progress.enter(before)

        patches.attribute(iterator, "__next__", __next__)

    @guarded("phases")
    def _phase_changes(self, before: str, after: str) -> None:
        peak = self._device.split()
        if peak is not None and peak > self._peaks.get(before, 0):
            self._peaks[before] = peak
        if self._every_phase:
            self._emit({"k": "phase", "phase": after, "step": self._progress.step})

    @guarded("phases")
    def finish_step(self, step: int) -> None:
        """Emit the peak of each phase of `step`."""
        for phase, peak in self._peaks.items():
            self._emit({"k": "phase_peak", "phase": phase, "step": step, "peak_allocated_bytes": peak})
        self._peaks.clear()

    @guarded("phases")
    def break_off(self, step: int) -> None:
        """Emit the peaks of `step`, which an out-of-memory error ends or interrupts; the running phase counts."""
        peak, phase = self._device.split(), self._progress.phase
        if peak is not None and peak > self._peaks.get(phase, 0):
            self._peaks[phase] = peak
        self.finish_step(step)

    def _size(self, module: Any) -> int:
        """Number of modules inside, counted on first sight: the model is larger than its loss."""
        size = self._sizes.get(module)
        if size is None:
            size = self._sizes[module] = sum(1 for _ in module.modules())
        return size


def _numel(torch: Any, value: Any, depth: int = 3) -> int:
    if isinstance(value, torch.Tensor):
        return int(value.numel())
    if depth and isinstance(value, dict):
        return sum(_numel(torch, each, depth - 1) for each in value.values())
    if depth and isinstance(value, (tuple, list)):
        return sum(_numel(torch, each, depth - 1) for each in value[:64])
    return 0


def _autocast_enabled(torch: Any) -> bool:
    try:
        return bool(torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"))
    except TypeError:  # torch < 2.4 takes no argument
        return bool(torch.is_autocast_enabled())


@guarded("model")
def model_record(torch: Any, probe: ModuleProbe | None, optimizers: list[Any]) -> dict[str, Any] | None:
    """What the model and its optimizer hold, in bytes; None when there is neither."""
    root = probe.root if probe is not None else None
    if root is None and not optimizers:
        return None
    parameters = list(root.parameters()) if root is not None else _grouped(optimizers)
    return {
        "k": "model",
        "parameters_bytes": _bytes(parameters),
        "gradients_bytes": _bytes([each.grad for each in parameters if each.grad is not None]),
        "optimizer_bytes": sum(_bytes(_state_tensors(torch, each)) for each in optimizers),
        "trainable": _bytes([each for each in parameters if each.requires_grad]),
        "block_groups": block_groups(root) if root is not None else [],
        "root_class": type(root).__name__ if root is not None else None,
        "autocast": probe.autocast if probe is not None else None,
        "optimizer": type(optimizers[0]).__name__ if optimizers else None,
        "has_batchnorm": _has_batchnorm(torch, root) if root is not None else None,
        "ddp": _is_ddp(torch, root),
    }


def block_groups(root: Any) -> list[dict[str, Any]]:
    """Containers of at least two modules of one class with parameters: the repeated blocks of a network."""
    groups = []
    inside: list[str] = []
    for path, module in root.named_modules():
        if any(path.startswith(prefix) for prefix in inside):
            continue
        children = list(module._modules.values())
        if type(module).__name__ not in ("ModuleList", "Sequential", "ModuleDict") or len(children) < 2:
            continue
        kinds = {type(child) for child in children}
        if len(kinds) == 1 and any(True for child in children for _ in child.modules() if child._modules):
            groups.append({"class": kinds.pop().__name__, "count": len(children), "path": path})
            inside.append(path + ".")
    return groups


def _grouped(optimizers: list[Any]) -> list[Any]:
    seen: dict[int, Any] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                seen[id(parameter)] = parameter
    return list(seen.values())


def _state_tensors(torch: Any, optimizer: Any) -> list[Any]:
    return [
        value
        for state in optimizer.state.values()
        if isinstance(state, dict)
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]


def _bytes(tensors: list[Any]) -> int:
    """Bytes on this rank: of a tensor that is spread over ranks (DTensor) its own shard counts."""
    own = [getattr(each, "_local_tensor", each) for each in tensors]
    return sum(each.numel() * each.element_size() for each in own)


def _has_batchnorm(torch: Any, root: Any) -> bool:
    kind = torch.nn.modules.batchnorm._BatchNorm
    return any(isinstance(module, kind) for module in root.modules())


def _is_ddp(torch: Any, root: Any) -> bool:
    names = {"DistributedDataParallel", "FullyShardedDataParallel"}
    return type(root).__name__ in names
