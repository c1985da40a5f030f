"""The fake NVML library for tests of the collectors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import fakenvml

needs_compiler = pytest.mark.skipif(
    fakenvml.compiler() is None, reason="no C compiler (gcc) for the fake libnvidia-ml"
)


@pytest.fixture(scope="session")
def nvml_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nvml")


@pytest.fixture
def machine(nvml_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., fakenvml.FakeNvml]]:
    """Makes a fake machine and puts it in the place of the driver of this process."""
    if fakenvml.compiler() is None:
        pytest.skip("no C compiler (gcc) for the fake libnvidia-ml")
    made: list[fakenvml.FakeNvml] = []

    def make(
        *args: Any, scenario: str | None = None, pids: dict[str, int] | None = None, **kwargs: Any
    ) -> Any:
        if scenario is not None:
            fake = fakenvml.from_scenario(nvml_folder, scenario, pids)
        else:
            fake = fakenvml.FakeNvml(nvml_folder, *args, **kwargs)
        made.append(fake)
        monkeypatch.setenv("FAKE_NVML_STATE", str(fake.path))
        use(monkeypatch, fake.load_private_copy())
        return fake

    yield make
    pynvml._nvmlGetFunctionPointer_cache.clear()
    for fake in made:
        fake.close()


@pytest.fixture
def pure(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., fakenvml.PureLib]]:
    """The same without a compiler."""

    def make(*args: Any, **kwargs: Any) -> fakenvml.PureLib:
        lib = fakenvml.PureLib(*args, **kwargs)
        use(monkeypatch, lib)
        return lib

    yield make
    pynvml._nvmlGetFunctionPointer_cache.clear()


def use(monkeypatch: pytest.MonkeyPatch, library: Any) -> None:
    monkeypatch.setattr(pynvml, "nvmlLib", library)
    monkeypatch.setattr(pynvml, "_nvmlLib_refcount", 0)
    pynvml._nvmlGetFunctionPointer_cache.clear()
