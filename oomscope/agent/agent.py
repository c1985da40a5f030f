"""The agent of one process: dormant at first, active once the process turns out to be a rank.

A dormant agent owns no file, no thread and no socket: DataLoader workers, launchers and compile workers stay
as they were.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from typing import Any

from ..protocol import env as variables
from ..protocol import layout
from ..protocol.records import Identity
from . import exceptions, guard, identity
from .dynamo import keep_out
from .guard import guarded
from .holders import HolderProbe
from .introduction import hello
from .nodes import has_other_nodes, introduce
from .patching import AfterImport, Patches
from .peers import Peers
from .phases import ModuleProbe, model_record
from .probes import Progress, StepProbe
from .readings import DeviceMemory, HostMemory
from .recorder import Recorder
from .sampler import Sampler
from .saving import CheckpointProbe
from .spawned import hear_spawned_ranks
from .termination import StackOnTerm
from .writer import Emitter

#: Ranks below this number write a snapshot when another rank ran out of memory.
MAX_PEER_SNAPSHOTS = 8


class Agent:
    """All probes of this process, and its record file once it is active."""

    def __init__(self, torch: Any, config: dict[str, Any], folder: str) -> None:
        """`config` is agent.json; `folder` holds it and prefixes the file names of our own frames."""
        self.torch = torch
        self.config = config
        self.progress = Progress()
        self.emitter = Emitter()
        self.emit = self.emitter.emit
        self.identity: Identity = {}
        self.is_helper = identity.is_multiprocessing_child()
        self.is_launcher = identity.is_launcher()
        self.active = False
        self._is_forked = False
        self._is_worker = False
        """Forked from a rank that had joined its group already: a loader worker, say, and no rank itself."""
        self.host = HostMemory()
        self.device = DeviceMemory(torch)
        self.patches = Patches()
        self.after_import = AfterImport()
        self.modules: ModuleProbe | None = None
        self._own = folder + "/_oomscope_job"
        self._lock = threading.Lock()
        self._sampler: Sampler | None = None
        self._peers: Peers | None = None
        self._term: StackOnTerm | None = None
        self._told_rank: tuple[Any, ...] | None = None
        self._told_model = False
        self.steps = StepProbe(
            torch,
            self.progress,
            self.device,
            self.host,
            self.emit,
            on_first_use=self._first_use,
            on_step=self._after_step,
            stop_after=config.get("steps"),
            simulated=self.is_simulated,
        )
        self.holders = HolderProbe(
            torch,
            self.emit,
            own_folder=self._own,
            always=bool(config.get("detail")),
            host_counts=not self.is_simulated,
        )
        self.steps.holders = self.holders
        self.recorder = Recorder(
            torch,
            config,
            self.progress,
            self.device,
            self.host,
            self.emit,
            own_folder=self._own,
            snapshot_name=lambda step, reason: layout.snapshot_file(self.identity.get("rank"), step, reason),
            on_oom=self._after_oom,
        )
        self.exceptions = exceptions.ExceptionProbe(
            self.emit, own_folder=self._own, before=self._may_speak, on_exception=self._after_exception
        )

    @property
    def is_simulated(self) -> bool:
        return bool(self.config.get("device"))

    @property
    def is_detailed(self) -> bool:
        """Whether phases and modules are tracked.

        On a simulated device, in predictions, and when asked for.
        """
        return bool(self.config.get("detail") or self.is_simulated or self.config.get("role") == "prediction")

    # -- dormant

    def arm(self) -> None:
        """Install the probes; nothing is written yet."""
        guard.report_to(self.emit)
        self._arm_steps()
        if self.is_detailed:
            self._arm_modules()
        self._arm_checkpoints()
        keep_out(self.after_import)
        self._arm_group()
        hear_spawned_ranks(self.patches, self.after_import, self.exceptions)
        self._arm_cuda()
        self.exceptions.install()
        os.register_at_fork(after_in_child=self._forked)
        if self._is_rank_already():
            self.activate()

    @guarded("steps")
    def _arm_steps(self) -> None:
        self.steps.install(self.patches)

    @guarded("modules")
    def _arm_modules(self) -> None:
        self.modules = ModuleProbe(
            self.torch,
            self.progress,
            self.steps,
            self.device,
            self.emit,
            on_first_use=self._first_use,
            every_phase=bool(self.config.get("detail")),
        )
        self.modules.install(self.patches, self.after_import)
        self.steps.modules = self.modules

    @guarded("checkpoints")
    def _arm_checkpoints(self) -> None:
        CheckpointProbe(self.progress, self.emit).install(self.torch, self.patches, self.after_import)

    def _arm_group(self) -> None:
        """Notice the process group: mp.spawn ranks become known by it, and its rank is the true one."""

        @guarded("group")
        def patch(module: Any) -> None:
            inner = getattr(module, "_update_default_pg", None)
            if inner is None:
                return

            def update(group: Any) -> Any:
                result = inner(group)
                self._group_changed()
                return result

            self.patches.attribute(module, "_update_default_pg", update)

        self.after_import.when("torch.distributed.distributed_c10d", patch)

    @guarded("cuda")
    def _arm_cuda(self) -> None:
        lazy_call = getattr(self.torch.cuda, "_lazy_call", None)
        if lazy_call is not None and hasattr(self.torch._C, "_cuda_memoryStats"):
            lazy_call(self._cuda_ready)

    @guarded("cuda")
    def _cuda_ready(self) -> None:
        """CUDA was initialised in this process (a simulated device is from the start)."""
        self.recorder.arm()
        if self.is_simulated:
            self.device.notice()
        else:
            self.activate()

    def _is_rank_already(self) -> bool:
        """Whether this process is a rank for sure, before it has done anything."""
        if self.is_helper or self.is_launcher:
            return False
        found = identity.read_identity()
        if identity.is_helper(found):
            return False
        if found.get("rank") is not None:
            return True
        return bool(self.config.get("main_is_rank")) and os.getppid() == self.config.get("supervisor_pid")

    # -- active

    def activate(self) -> None:
        """Become a rank: open the record file, start the thread, say hello. Does nothing the second time."""
        if self.active or self.is_launcher:
            return
        with self._lock:
            if not self.active:
                self.active = True
                self._start()

    def _first_use(self) -> None:
        """Training visibly begins: the script has chosen its device by now."""
        self.activate()
        self.device.notice()
        self._tell_rank()

    @guarded("start")
    def _start(self) -> None:
        self.identity = self._who()
        os.environ[variables.OWNER] = identity.owner_mark(self.identity)
        host = socket.gethostname()
        name = layout.proc_file(self.identity.get("rank"), host, os.getpid())
        path = os.path.join(self.config["attempt_dir"], layout.PROCS_DIR, name)
        self.emitter.open(path, hello(self.torch, self.config, self.identity, host))
        self._tell_rank()
        self._sampler = Sampler(self._tick)
        self._peers = Peers(
            self.config["rundir"],
            self.emit,
            own_folder=self._own,
            facts=lambda: {**self.reading(), "k": "dump"},
            snapshot=self._peer_snapshot,
        )
        self._peers.has_other_nodes = has_other_nodes(self.identity)
        if self._peers.open():
            self._sampler.listen(self._peers.socket, self._peers.receive)
        self._sampler.start()
        stacks = os.path.join(self.config["attempt_dir"], layout.STACKS_DIR, name.replace(".jsonl", ".txt"))
        self._term = StackOnTerm(stacks)
        self._term.install()
        if self._is_forked:
            # multiprocessing ends a forked child without atexit handlers, but with its own.
            from multiprocessing.util import Finalize

            Finalize(None, self.goodbye, exitpriority=-1000)

    def _who(self) -> Identity:
        """The identity, with rank 0 for the one process of a plain script, and None for a helper."""
        found = identity.read_identity()
        group = self._group()
        if group is not None:
            found["rank"], found["world_size"] = group
        elif self.is_helper or identity.is_helper(found):
            found["rank"] = None
        elif found.get("rank") is None:
            found["rank"], found["local_rank"], found["world_size"] = 0, 0, 1
        return found

    def _group(self) -> tuple[int, int] | None:
        if self._is_worker:
            return None
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not getattr(distributed, "is_initialized", lambda: False)():
            return variables.simulated_rank(os.environ) if self.is_simulated else None
        return int(distributed.get_rank()), int(distributed.get_world_size())

    @guarded("group")
    def _group_changed(self) -> None:
        group = self._group()
        if group is None:
            return
        self.activate()
        self.identity["rank"], self.identity["world_size"] = group
        os.environ[variables.OWNER] = identity.owner_mark(self.identity)
        self._tell_rank()
        if self._peers is not None and not self.is_simulated:
            self._peers.has_other_nodes = has_other_nodes(self.identity)
            introduce(self.identity, self.config["rundir"])

    @guarded("rank")
    def _tell_rank(self) -> None:
        """Emit `rank` when something in it has changed."""
        device = self.device.device()
        simulated = self.config.get("device") or {}
        name, uuid, capacity = simulated.get("name"), None, simulated.get("capacity_bytes")
        if device is not None and not simulated:
            properties = self.torch.cuda.get_device_properties(device)
            name, uuid, capacity = (
                properties.name,
                str(getattr(properties, "uuid", "") or "") or None,
                properties.total_memory,
            )
        facts = {
            "rank": self.identity.get("rank"),
            "local_rank": self.identity.get("local_rank"),
            "world_size": self.identity.get("world_size"),
            "device": device if device is not None or not simulated else 0,
            "gpu_name": name,
            "gpu_uuid": uuid,
            "capacity_bytes": capacity,
            "simulated": bool(simulated),
        }
        key = tuple(facts.values())
        if key != self._told_rank:
            self._told_rank = key
            self.emit({"k": "rank", **facts})
            self.emitter.flush()

    def _after_step(self, done: int) -> None:
        if done == 1:
            self._tell_rank()
            self._tell_model()

    @guarded("model")
    def _tell_model(self) -> None:
        record = model_record(self.torch, self.modules, list(self.steps.optimizers))
        if record is not None:
            self.emit(record)

    def _tick(self) -> None:
        """Twice a second, in the agent's thread: no CUDA calls here."""
        self.emit(self.reading())
        self.emitter.flush()

    def reading(self) -> dict[str, Any]:
        """A `reading` record."""
        free, total = self.device.driver()
        self.host.read_high_water()
        return {
            "k": "reading",
            **self.device.now(),
            "device_free_bytes": free,
            "device_total_bytes": total,
            "rss_bytes": self.host.rss_bytes(),
            "peak_rss_bytes": self.host.peak_rss_bytes,
            "step": self.progress.step,
            "micro_step": self.progress.micro_step,
            "phase": self.progress.phase,
        }

    # -- the end

    def _peer_snapshot(self, reason: str) -> str | None:
        """A snapshot of this rank when another one asked.

        Of the first ranks only, because each may be large.
        """
        rank = self.identity.get("rank")
        if not self.device.is_used or rank is None or rank >= MAX_PEER_SNAPSHOTS:
            return None
        return str(self.recorder.snapshot(reason) or "") or None

    def _may_speak(self) -> bool:
        """Before an exception is recorded: a main process that died before it trained is worth a record."""
        if not self.active and not self.is_helper:
            self.activate()
        return self.active

    def _after_oom(self, record: dict[str, Any]) -> None:
        self.activate()
        if self.modules is not None:
            self.modules.break_off(self.progress.step)
        self._tell_model()

    def _after_exception(self, record: dict[str, Any], error: BaseException) -> None:
        if record["main_thread"]:
            guarded("torchelastic")(exceptions.write_torchelastic_error)(record)
        if record["is_oom"] and self._peers is not None:
            self._peers.alarm("oom", self.identity.get("rank"))

    @guarded("bye")
    def goodbye(self) -> None:
        """At the end of the interpreter, after everybody else's handlers."""
        if not self.active:
            return
        self.exceptions.at_exit()
        self.steps.finish()
        if self._sampler is not None:
            self._sampler.stop()
        self.emit(self.reading())
        self.emit({"k": "bye", "steps": self.progress.step})
        self.emitter.close()
        if self._peers is not None:
            self._peers.close()
        if self._term is not None:
            self._term.tidy()

    @guarded("fork")
    def _forked(self) -> None:
        """In a forked child: become dormant again, and share nothing with the parent."""
        self.active = False
        self._is_worker = self._is_worker or self._group() is not None
        self.is_helper = self._is_forked = True
        self._lock = threading.Lock()
        self._sampler = None
        self._told_rank = None
        self.emitter.after_fork()
        self.exceptions.remove()
        if self._peers is not None:
            self._peers.after_fork()
        if self._term is not None:
            self._term.remove()
        self._peers = self._term = None
        self.host = self.steps._host = self.recorder._host = HostMemory()
        self.progress.step = 0
        self.progress.phase = "other"
