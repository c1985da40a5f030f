"""What happens right after `import torch`: the simulated device first, then the fixes, then the probes."""

from __future__ import annotations

import atexit
import importlib
import json
import os
import sys
from typing import Any, Callable

from ..protocol import env as variables
from ..protocol import layout
from . import elastic, identity
from .agent import Agent
from .guard import failed, guarded

#: Exit code of a process that never got to the user's script, as `oomscope run` documents it.
NOT_STARTED = 125

#: The agent of this process, once torch was imported.
AGENT: Agent | None = None


def start(folder: str) -> None:
    """Start the agent of this process; `folder` holds agent.json. Called once, by the bundle.

    Raises:
        OSError, ValueError: agent.json cannot be read. The caller stays silent about it.
    """
    global AGENT
    if AGENT is not None:
        return
    with open(os.path.join(folder, layout.AGENT_CONFIG), encoding="utf-8") as stream:
        config: dict[str, Any] = json.load(stream)
    torch: Any = sys.modules["torch"]
    launcher = identity.is_launcher()
    if launcher:
        elastic.listen(config["attempt_dir"])
    early = _Early()
    # Handlers run in reverse order: what the simulated device says at the end comes before the agent's
    # goodbye.
    atexit.register(early.end)
    reason = None
    if config.get("device") and not launcher and _has_device():
        reason = _start_simulation(config, early)
    AGENT = agent = Agent(torch, config, folder)
    early.connect(agent)
    if reason is not None:
        _refuse(agent, reason)
    if config.get("plan") and (config["plan"].get("fixes")) and not launcher:
        _apply_plan(config["plan"], agent.emit)
    agent.arm()


def _has_device() -> bool:
    """Not for helpers of multiprocessing: data loader workers, resource trackers."""
    return not identity.is_multiprocessing_child() or variables.SIMULATED_RANK in os.environ


class _Early:
    """Stands in for the agent that does not exist yet: keeps records, and answers where the script is."""

    def __init__(self) -> None:
        self._kept: list[dict[str, Any]] = []
        self._agent: Agent | None = None

    def emit(self, record: dict[str, Any]) -> None:
        if self._agent is None:
            self._kept.append(record)
        else:
            self._agent.emit(record)

    def where(self) -> tuple[int, str]:
        """(step, phase) now."""
        return (0, "other") if self._agent is None else self._agent.progress.current()

    def modules(self) -> tuple[Any, ...]:
        """The modules that run now, outermost first."""
        probe = None if self._agent is None else self._agent.modules
        return () if probe is None else tuple(probe.stack)

    def end(self) -> None:
        """The process ends."""
        if self._agent is not None:
            self._agent.goodbye()

    def connect(self, agent: Agent) -> None:
        self._agent = agent
        for record in self._kept:
            agent.emit(record)
        self._kept = []


def current() -> tuple[int, str]:
    """(step, phase) of this process, for the fixes and the simulated device."""
    return (0, "other") if AGENT is None else AGENT.progress.current()


def _start_simulation(config: dict[str, Any], early: _Early) -> str | None:
    """Start the simulated device; returns why it could not be, in one sentence, or None."""
    begin: Callable[..., Any] | None = getattr(_optional("simulate"), "start", None)
    if begin is None:
        return "this launch brought no simulated device along"
    try:
        session = begin({**config, "where": early.where, "modules": early.modules}, early.emit)
        config["device"]["capacity_bytes"] = session.device.capacity_bytes
    except Exception as error:  # noqa: BLE001  # the agent guard
        failed("simulate")
        early.emit({"k": "agent_error", "probe": "simulate", "error": _last_error()})
        return str(error) or type(error).__name__
    return None


def _refuse(agent: Agent, reason: str) -> None:
    """End a job whose simulated device does not exist.

    On the real machine it would be another job, or hang.
    """
    agent.activate()
    agent.goodbye()
    sys.stderr.write(f"oomscope: the simulated device cannot start: {reason}\n")
    raise SystemExit(NOT_STARTED)


@guarded("apply")
def _apply_plan(plan: dict[str, Any], emit: Callable[[dict[str, Any]], None]) -> None:
    apply = getattr(_optional("agent.apply"), "apply", None)
    if apply is not None:
        apply(plan, emit)


def _optional(name: str) -> Any:
    """A module of ours that this bundle may not hold."""
    package = __name__.split(".")[0]
    full = f"{package}.{name}"
    try:
        return importlib.import_module(full)
    except ModuleNotFoundError as error:
        if error.name and full.startswith(error.name):
            return None
        raise


def _last_error() -> str:
    import traceback

    return traceback.format_exc()[-4000:]
