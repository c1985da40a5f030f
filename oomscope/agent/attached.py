"""The agent in a process that we did not start: armed from a foreign thread, able to leave without a trace.

It differs from the usual start in three ways. Nothing may assume the main thread or its current device (in
every rank a new thread has device 0, and a wrong call would create a context there). Everything installed is
taken out again on `detach`. And it leaves by itself when nobody renews the lease: a viewer that was killed
must not leave its agent behind.

A detach runs in the agent's own thread, so that no file is closed under a thread that still writes to it: the
number would be reused by the job, and our line would land in its data.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
import weakref
from typing import Any, Callable

from ..protocol import env as variables
from ..protocol import layout
from . import guard
from .agent import Agent
from .guard import guarded
from .history import start_history, stop_history

#: The attached agent of this process; None before the first attach and after a detach.
CURRENT: Attached | None = None

#: Set once: handlers of os.register_at_fork cannot be removed.
_fork_hooked = False
#: What the last detached agent left open because the training thread might have been inside it.
_left_open: list[Any] = []
#: The wrapped counters of the last agent, with the peaks it hid from the script.
_old_peaks: Any = None

#: How long an import of torch that has begun may take; the other side waits for an answer for ten seconds.
_IMPORT_S = 8.0

_COUNTERS = ("_cuda_memoryStats", "_cuda_resetPeakMemoryStats")


def attach(folder: str) -> None:
    """Start the agent with the configuration in `folder`/agent.json and leave an answer for the other side.

    The answer, `attach-<pid>.json` in the attempt's folder: {"ok", "code", "text", "attempt_dir"}; codes
    attached, already (an agent of ours is active here, attempt_dir says where), no_torch, failed.
    """
    with open(os.path.join(folder, layout.AGENT_CONFIG), encoding="utf-8") as stream:
        config: dict[str, Any] = json.load(stream)
    try:
        answer = _attach(config, folder)
    except Exception:  # noqa: BLE001  # the agent guard
        import traceback

        answer = {"ok": False, "code": "failed", "text": traceback.format_exc()[-4000:]}
    path = os.path.join(config["attempt_dir"], f"attach-{os.getpid()}.json")
    with open(path + ".part", "w", encoding="utf-8") as stream:
        json.dump(answer, stream)
    os.replace(path + ".part", path)


def _attach(config: dict[str, Any], folder: str) -> dict[str, Any]:
    global CURRENT, _fork_hooked
    if "torch" not in sys.modules:
        return {"ok": False, "code": "no_torch", "text": "this process has not imported torch"}
    torch = _whole_torch()
    if torch is None:
        return {
            "ok": False,
            "code": "no_torch",
            "text": "this process is still importing torch: attach again",
        }
    active = _active_agent()
    if active is not None:
        return {
            "ok": False,
            "code": "already",
            "text": "an agent of oomscope is active in this process",
            "attempt_dir": active.config.get("attempt_dir"),
        }
    while _left_open:
        _left_open.pop().close()
    guard.OFF.clear()
    CURRENT = Attached(torch, config, _source_folder(folder))
    if not _fork_hooked:
        _fork_hooked = True
        os.register_at_fork(after_in_child=_forked)
    CURRENT.start()
    return {"ok": True, "code": "attached", "text": "", "attempt_dir": config["attempt_dir"]}


def _whole_torch() -> Any:
    """torch, once its import is over; None when that takes too long. Half of it would take hooks and lose them."""
    until = time.monotonic() + _IMPORT_S
    while time.monotonic() < until:
        torch = sys.modules.get("torch")
        if torch is not None and not getattr(getattr(torch, "__spec__", None), "_initializing", False):
            return torch if hasattr(torch, "__version__") else None
        time.sleep(0.02)
    return None


def _source_folder(folder: str) -> str:
    """Prefix of our own frames: where the bundle was loaded from, which an earlier attach may have done."""
    mark = "/_oomscope_job/"
    return __file__.rpartition(mark)[0] if mark in __file__ else folder


def _active_agent() -> Any:
    if CURRENT is not None and not CURRENT.stopped:
        return CURRENT.agent
    bootstrap = sys.modules.get(__name__.rpartition(".")[0] + ".bootstrap")
    agent = getattr(bootstrap, "AGENT", None)
    return agent if agent is not None and agent.active else None


def _forked() -> None:
    if CURRENT is not None and not CURRENT.stopped:
        CURRENT.forked()


class Attached:
    """One attachment: an `Agent`, what it armed, and the lease.

    Configuration beyond that of a launched agent: `lease` (a file; its age is the life sign of the other
    side, its content may be {"detach": true}), `lease_s` (how old it may get), `snapshot_on_detach`.
    """

    def __init__(self, torch: Any, config: dict[str, Any], folder: str) -> None:
        self.stopped = False
        self._torch = torch
        self._config = config
        self._lease = config["lease"]
        self._lease_s = float(config["lease_s"])
        self._owner_before = os.environ.get(variables.OWNER)
        self._history = False
        self._observing = False
        self._seen_first_step = False
        self._told_root: Callable[[], Any] = lambda: None
        self.agent = self._build(torch, config, folder)

    @staticmethod
    def _build(torch: Any, config: dict[str, Any], folder: str) -> Agent:
        """The agent, with the counters wrapped once however often we come: layers would add up."""
        global _old_peaks
        if _old_peaks is not None:
            for name, original in zip(_COUNTERS, (_old_peaks._stats, _old_peaks._reset)):
                if original is not None:
                    setattr(torch._C, name, original)
        agent = Agent(torch, config, folder)
        if _old_peaks is not None:
            agent.device.peaks._hidden = _old_peaks._hidden
        _old_peaks = agent.device.peaks
        return agent

    def start(self) -> None:
        """Become active and arm everything."""
        agent = self.agent
        guard.report_to(agent.emit)
        # First of all: what is armed runs in the training thread at once, and would start a thread that ticks forever.
        agent._tick = self._tick  # type: ignore[method-assign]
        agent.activate()
        self._arm_steps()
        self._arm_modules()
        agent._arm_group()
        agent.exceptions.install()
        self._arm_device()
        atexit.register(agent.goodbye)
        agent.emit({"k": "attached", "lease_s": self._lease_s, "history": self._history})
        agent.emitter.flush(force=True)

    # -- arming

    @guarded("steps")
    def _arm_steps(self) -> None:
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        patches = self.agent.patches
        patches.handle(register_optimizer_step_pre_hook(self._before_step))
        self.agent.steps.install(patches)
        patches.handle(register_optimizer_step_post_hook(self._after_step))

    @guarded("modules")
    def _arm_modules(self) -> None:
        """Phases and the model: calls of modules go through the class, so they are seen in a model that exists already.

        Compiled code is left alone: it holds what it was traced with, and a changed `__call__` could make it compile
        anew in the middle of the job.
        """
        compiled = _compiled_frames()
        if compiled:
            text = f"forward and eval are not told apart: torch.compile has compiled {compiled} frames of this job"
            self.agent.emit({"k": "note", "text": text})
            return
        # Dynamo is not told to keep out of the hooks (`dynamo.keep_out`): it would hold the interpreter for 40 ms, and
        # that could not be taken back.
        self.agent._arm_modules()

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """In the training thread, before our step probe: count on from what the optimizer has done."""
        steps = self.agent.steps
        if self.stopped or optimizer in steps.optimizers:
            return
        done, source = _steps_done(optimizer)
        if not steps.optimizers:
            self.agent.progress.step = done
            self.agent.emit({"k": "note", "text": f"steps are counted from {done} ({source})"})
        steps.optimizers.add(optimizer)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """After the first step, and whenever the model is another one than was told.

        The first step may have begun before us: then no module was called yet, or a part of the model seemed to be all.
        """
        if self.stopped:
            return
        root = self.agent.modules.root if self.agent.modules is not None else None
        if self._seen_first_step and (root is None or root is self._told_root()):
            return
        self._seen_first_step = True
        if root is not None:
            self._told_root = weakref.ref(root)
        self.agent._tell_rank()
        self.agent._tell_model()

    @guarded("cuda")
    def _arm_device(self) -> None:
        """Observer and history, if CUDA is in use; never a call that could create a context."""
        torch = self._torch
        if torch.cuda.is_initialized():
            self._record_device()
            return
        lazy_call = getattr(torch.cuda, "_lazy_call", None)
        if lazy_call is not None and hasattr(torch._C, "_cuda_memoryStats"):
            lazy_call(self._cuda_started)

    def _cuda_started(self) -> None:
        """The job uses CUDA for the first time; a queued call cannot be taken back, so it may come after we left."""
        if not self.stopped:
            self._record_device()

    @guarded("cuda")
    def _record_device(self) -> None:
        torch = self._torch
        attach_observer = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
        if attach_observer is not None:
            attach_observer(self._observe)
            self._observing = True
        self._history = start_history(torch, self._config.get("history") or {})

    def _observe(self, device: int, requested: int, capacity: int, free: int) -> None:
        """An observer cannot be unregistered, so this one falls silent by itself."""
        if not self.stopped:
            self.agent.recorder.observe(device, requested, capacity, free)

    # -- the agent's thread

    def _tick(self) -> None:
        why = self._why_leave()
        if why is not None:
            self.detach(why)
            return
        self.agent.emit(self.agent.reading())
        self.agent.emitter.flush()

    def _why_leave(self) -> str | None:
        try:
            age = time.time() - os.stat(self._lease).st_mtime
            with open(self._lease, encoding="utf-8") as stream:
                text = stream.read(4096)
        except OSError:
            return "the lease is gone"
        if age > self._lease_s:
            return "the lease expired"
        try:
            order = json.loads(text) if text else {}
        except ValueError:  # being written
            return None
        return "asked to" if isinstance(order, dict) and order.get("detach") else None

    @guarded("detach")
    def detach(self, why: str) -> None:
        """Take everything out. Runs in the agent's thread."""
        global CURRENT
        if self.stopped:
            return
        self.stopped = True
        agent = self.agent
        self._disarm()
        agent.exceptions.remove()
        atexit.unregister(agent.goodbye)
        self._end_history()
        if agent._sampler is not None:
            agent._sampler.stop()
        if agent._peers is not None:
            agent._peers.close()
        if agent._term is not None:
            agent._term.remove()
            agent._term.tidy()
        agent.emit(agent.reading())
        agent.emit({"k": "detached", "why": why, "steps": agent.progress.step})
        agent.emit({"k": "bye", "steps": agent.progress.step})
        agent.emitter.close()
        guard.report_to(None)
        if self._owner_before is None:
            os.environ.pop(variables.OWNER, None)
        else:
            os.environ[variables.OWNER] = self._owner_before
        _left_open.append(agent.host)
        CURRENT = None

    def _disarm(self) -> None:
        self.agent.patches.undo()
        if self.agent.after_import in sys.meta_path:
            sys.meta_path.remove(self.agent.after_import)

    @guarded("history")
    def _end_history(self) -> None:
        """Switch the history off; that clears the ring, so a snapshot comes first when one is wanted."""
        if not self._history:
            return
        if self._config.get("snapshot_on_detach"):
            self.agent.recorder.snapshot("detach")
        stop_history(self._torch)

    def forked(self) -> None:
        """In a forked child of the job: no agent, no hooks, no file."""
        self.stopped = True
        self._disarm()
        self.agent._forked()


def _compiled_frames() -> int:
    """How many frames Dynamo has compiled in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    frames = getattr(utils, "counters", {}).get("frames") or {}
    return int(frames.get("ok", 0))


def _steps_done(optimizer: Any) -> tuple[int, str]:
    """How many steps `optimizer` has made, by its own count: Adam and its relatives keep one per parameter.

    A count that lives on a device is not read: that would wait for the device.
    """
    for state in optimizer.state.values():
        step = state.get("step") if isinstance(state, dict) else None
        if isinstance(step, int):
            return step, "the optimizer's own count"
        device = getattr(step, "device", None)
        if step is not None and getattr(device, "type", None) == "cpu":
            return int(step), "the optimizer's own count"
        break
    return 0, "the attach: this optimizer keeps no count"
