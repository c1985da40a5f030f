"""`torch.save` and `torch.load`: simulated tensors are stored as shapes, and never over a file that was there before.

A simulated run must leave the checkpoints of real runs alone, and must not leave files that a real run would resume
from: a file that exists is not written, what is saved under its name goes to a temporary folder and is loaded from
there; new files are removed when the process ends. And it must not fail at what the failed run left: a folder that was
made since the session began counts as not there yet.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import os
import shutil
import stat
import tempfile
from typing import Any, Callable

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from ...protocol.env import SESSION
from ...protocol.layout import SESSION_FILE


def install(mode: Any) -> None:
    """Replace `torch.save` and `torch.load`, and what gives a saved file another name."""
    plain_save, plain_load = torch.save, torch.load
    saved = _Saved()

    pickled = FakeTensor.__reduce_ex__
    saving = [0]

    def reduce(self: Any, protocol: Any) -> Any:
        """Also for tensors inside of modules and other objects, which are pickled whole."""
        return _as_shape(self).__reduce_ex__(protocol) if saving[0] else pickled(self, protocol)

    FakeTensor.__reduce_ex__ = reduce

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        saving[0] += 1
        try:
            return plain_save(obj, saved.to_write(f), *args, **kwargs)
        finally:
            saving[0] -= 1

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        target = None if map_location is None or callable(map_location) else map_location
        on_card = target is not None and not isinstance(target, dict) and "cuda" in str(target)
        plain_target = "cpu" if on_card or isinstance(map_location, dict) else map_location
        loaded = plain_load(saved.to_read(f), plain_target, *args, **kwargs)
        if str(target) == "meta":
            return loaded

        def revive(each: Any) -> Any:
            if isinstance(each, torch.nn.Module):
                for module in each.modules():
                    for owned in (module._parameters, module._buffers):
                        owned.update({name: revive(tensor) for name, tensor in owned.items()})
                return each
            if not isinstance(each, torch.Tensor):
                return each
            if each.device.type == "meta":
                return _revived(mode, each, target if target is not None else "cuda")
            return each.to(target) if on_card else each

        return tree_map(revive, loaded)

    save.__doc__, load.__doc__ = plain_save.__doc__, plain_load.__doc__
    torch.save, torch.load = save, load
    os.replace, os.rename = saved.renaming(os.replace), saved.renaming(os.rename)
    shutil.copyfile = saved.copying(shutil.copyfile)
    since = _session_start()
    if since is not None:
        os.mkdir = _making(os.mkdir, since)


def _session_start() -> float | None:
    """When the session was made that this run belongs to, in seconds since the epoch."""
    folder = os.environ.get(SESSION)
    try:
        return os.stat(os.path.join(folder, SESSION_FILE)).st_mtime if folder else None
    except OSError:
        return None


def _making(plain: Callable[..., Any], since: float) -> Callable[..., Any]:
    """`os.mkdir` that takes a folder which an earlier run of the same session left for a new one."""

    @functools.wraps(plain)
    def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
        try:
            plain(path, *args, **kwargs)
        except FileExistsError:
            found = os.stat(path)
            if not stat.S_ISDIR(found.st_mode) or found.st_mtime < since:
                raise

    return mkdir


class _Saved:
    """Where the files lie that this process saved, by the names that the script gave them."""

    def __init__(self) -> None:
        self._places: dict[str, str] = {}
        self._folder = ""
        self._owner = os.getpid()
        self._copy = shutil.copyfile
        atexit.register(self._remove)

    def to_write(self, f: Any) -> Any:
        """Where to write what the script saves as `f`: there, or elsewhere when another file has that name."""
        name = _name(f)
        if name is None:
            return f
        if name not in self._places:
            self._places[name] = self._elsewhere(name) if os.path.lexists(name) else name
        return self._places[name]

    def to_read(self, f: Any) -> Any:
        name = _name(f)
        return f if name is None else self._places.get(name, f)

    def renaming(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def rename(src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
            before = _name(src)
            if before is None or args or kwargs:
                return plain(src, dst, *args, **kwargs)
            place = self._places.get(before)
            if place is not None:
                target = self.to_write(dst)
                try:
                    plain(place, target)
                except OSError as problem:
                    if problem.errno != errno.EXDEV or not _on_one_file_system(before, str(_name(dst))):
                        raise
                    self._copy(place, target)  # only our temporary folder lies elsewhere
                    os.unlink(place)
                del self._places[before]
                return None
            result = plain(src, dst)
            self._follow(before, str(_name(dst)))
            return result

        return rename

    def copying(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def copyfile(src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
            if self.to_read(src) is src:
                return plain(src, dst, *args, **kwargs)
            plain(self.to_read(src), self.to_write(dst), *args, **kwargs)
            return dst

        return copyfile

    def _follow(self, before: str, after: str) -> None:
        """A folder with saved files got another name."""
        for name in [each for each in self._places if each.startswith(before + os.sep)]:
            new = after + name[len(before) :]
            place = self._places.pop(name)
            self._places[new] = new if place == name else place

    def _elsewhere(self, name: str) -> str:
        if not self._folder:
            self._folder = tempfile.mkdtemp(prefix="oomscope-saved-")
        return os.path.join(self._folder, f"{len(self._places)}-{os.path.basename(name)}")

    def _remove(self) -> None:
        if os.getpid() != self._owner:
            return
        for name, place in self._places.items():
            if place == name:
                with contextlib.suppress(OSError):
                    os.unlink(place)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def _name(f: Any) -> str | None:
    """The absolute path that `f` names; None for an open file."""
    return os.path.abspath(os.fsdecode(f)) if isinstance(f, (str, bytes, os.PathLike)) else None


def _on_one_file_system(*names: str) -> bool:
    return len({os.stat(os.path.dirname(name)).st_dev for name in names}) == 1


def _as_shape(each: Any) -> Any:
    if not isinstance(each, FakeTensor):
        return each
    shape = torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")
    return torch.nn.Parameter(shape, each.requires_grad) if isinstance(each, torch.nn.Parameter) else shape


def _revived(mode: Any, shape: Any, device: Any) -> Any:
    if "cuda" in str(device):
        new = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype, device=device)
    else:
        with mode.fake:
            new = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype, device="cpu")
    return torch.nn.Parameter(new, shape.requires_grad) if isinstance(shape, torch.nn.Parameter) else new
