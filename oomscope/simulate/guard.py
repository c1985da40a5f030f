"""Makes torch's C++ core accept CUDA tensors where there is no CUDA: device guard and hooks, by ctypes.

Without a registered device guard the process aborts at the first differentiable operation on a CUDA tensor,
and `FakeTensorMode` only replaces a guard that exists. So:

1. An object whose virtual functions all return 0 is put into `c10::impl::device_guard_impl_registry`.
   libc10's own `ensureCUDADeviceGuardSet()` then sees a guard without devices and replaces it with its fake
   guard.
2. Two slots of the CUDA hooks' table of virtual functions, `isBuilt` and `hasPrimaryContext`, are replaced
   with a native function that returns true; the autograd engine asks both.

Slot numbers are read from the C++ headers that every wheel ships, so that they follow the installed version.
A build with CUDA registers its own guard, which would call the driver: it is replaced as well.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from typing import Any

import torch

from ..errors import SetupError

_CUDA = 1
"""Index of CUDA in `c10::DeviceType` (c10/core/DeviceType.h)."""
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
_SLOTS_OF_DUMMY = 64
_keep: list[Any] = []
"""Native memory that must live as long as the process."""
_set_device: Any = None
_get_device: Any = None


def install(devices: int) -> None:
    """Make `cuda:0` … `cuda:{devices-1}` valid for torch's C++ core; only once in a process.

    Raises:
        SetupError: this build of torch is laid out differently.
    """
    try:
        returns_true = _install_guard(devices)
        _install_hooks(returns_true)
    except (OSError, AttributeError, ValueError, IndexError) as problem:
        raise SetupError(
            f"the simulated device does not know the layout of torch {torch.__version__}: {problem}",
            hint="use torch 2.13 for Linux, or run on a real GPU",
        ) from problem


def hide_real_devices() -> None:
    """Let CUDA's own libraries find no card in this process, whatever calls them.

    Only the C library's environment is changed: what the script reads in `os.environ` stays as it was.
    """
    ctypes.CDLL(None).setenv(b"CUDA_VISIBLE_DEVICES", b"", 1)


def make_current(index: int) -> None:
    """Tell torch's C++ core the current device of the calling thread; `.cuda()` goes there."""
    if _set_device is not None:
        _set_device(index << 8 | _CUDA)


def current() -> int:
    """The current device of the calling thread, as torch's C++ core knows it."""
    return 0 if _get_device is None else int(_get_device()) >> 8


def _install_guard(devices: int) -> int:
    """Put a working guard in place; returns the address of a native function that returns true."""
    registry = (ctypes.c_void_p * 32).in_dll(_library("libc10"), _REGISTRY)
    zero = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0)
    address = ctypes.cast(zero, ctypes.c_void_p).value
    table = (ctypes.c_void_p * _SLOTS_OF_DUMMY)(*([address] * _SLOTS_OF_DUMMY))
    dummy = (ctypes.c_void_p * 2)(ctypes.addressof(table), 0)
    _keep.extend([zero, table, dummy])
    registry[_CUDA] = ctypes.addressof(dummy)
    torch._C._ensureCUDADeviceGuardSet()
    guard = registry[_CUDA]
    if guard is None or guard == ctypes.addressof(dummy):
        raise ValueError("the device guard was not replaced")
    slots = _virtual_functions("c10/core/impl/DeviceGuardImplInterface.h", "DeviceGuardImplInterface")
    functions = ctypes.cast(
        ctypes.cast(guard, ctypes.POINTER(ctypes.c_void_p))[0], ctypes.POINTER(ctypes.c_void_p)
    )
    _find_current(guard, functions, slots)
    counter = slots.index("deviceCount")
    count = ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)(functions[counter])(guard)
    # Both candidates are compiled as `return <constant>;`: deviceCount() of the one-device guard,
    # queryEvent() otherwise.
    returns_true = functions[counter] if count == 1 else functions[slots.index("queryEvent")]
    if (
        ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_void_p)(returns_true)(guard, None)
        is not True
    ):
        raise ValueError("no native function that returns true")
    if devices > count:
        counted = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _self: devices)
        _keep.append(counted)
        _replace(guard, len(slots), {counter: ctypes.cast(counted, ctypes.c_void_p).value})
    return int(returns_true)


def _find_current(guard: int, functions: Any, slots: list[str]) -> None:
    """`c10::Device` is two bytes, type and index, and is passed as a number (c10/core/Device.h)."""
    global _set_device, _get_device
    setter = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint16)(
        functions[slots.index("uncheckedSetDevice")]
    )
    getter = ctypes.CFUNCTYPE(ctypes.c_uint16, ctypes.c_void_p)(functions[slots.index("getDevice")])
    _set_device, _get_device = functools.partial(setter, guard), functools.partial(getter, guard)


def _install_hooks(returns_true: int) -> None:
    get_hooks = _library("libtorch_cpu")._ZN2at6detail12getCUDAHooksEv
    get_hooks.restype = ctypes.c_void_p
    inherited = _virtual_functions(
        "ATen/detail/AcceleratorHooksInterface.h", "AcceleratorHooksInterface", whole=True
    )
    own = _virtual_functions("ATen/detail/CUDAHooksInterface.h", "CUDAHooksInterface", whole=True)
    slots = {inherited.index(name): returns_true for name in ("isBuilt", "hasPrimaryContext")}
    _replace(get_hooks(), len(inherited) + len(own), slots)


def _library(name: str) -> ctypes.CDLL:
    folder = os.path.join(os.path.dirname(torch.__file__), "lib")
    for suffix in (".so", ".dylib"):
        path = os.path.join(folder, name + suffix)
        if os.path.exists(path):
            return ctypes.CDLL(path)
    raise OSError(f"{name} is not in {folder}")


def _virtual_functions(header: str, struct: str, whole: bool = False) -> list[str]:
    """Names of the virtual functions of `struct` in table order (Itanium ABI: a destructor takes two slots).

    The guard's interface ends at its destructor; `whole` reads on behind it.
    """
    with open(os.path.join(os.path.dirname(torch.__file__), "include", header), encoding="utf-8") as file:
        text = file.read()
    text = re.sub(r"/\*.*?\*/", "", re.sub(r"//[^\n]*", "", text), flags=re.S)
    body = re.split(r"struct\s+(?:C10_API|TORCH_API)?\s*" + struct + r"\b[^;{]*\{", text, maxsplit=1)[1]
    names: list[str] = []
    for match in re.finditer(r"\bvirtual\s+[^;{]*?([~\w]+)\s*\(", body):
        name = match.group(1)
        destructor = name.startswith("~")
        names += [name, name] if destructor else [name]
        if destructor and not whole:
            break
    return names


def _replace(instance: int, size: int, slots: dict[int, Any]) -> None:
    """Give one C++ object its own copy of its table of virtual functions, with some slots replaced."""
    pointer = ctypes.cast(instance, ctypes.POINTER(ctypes.c_void_p))
    header = 2  # offset to top and run-time type information stand in front of the table
    old = ctypes.cast(pointer[0] - header * ctypes.sizeof(ctypes.c_void_p), ctypes.POINTER(ctypes.c_void_p))
    table = (ctypes.c_void_p * (size + header))(*[old[index] for index in range(size + header)])
    for index, address in slots.items():
        table[index + header] = address
    pointer[0] = ctypes.addressof(table) + header * ctypes.sizeof(ctypes.c_void_p)
    _keep.append(table)
