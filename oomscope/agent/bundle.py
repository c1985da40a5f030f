"""The job's side of oomscope as one self-contained source text.

The job may run in another environment than oomscope, and a running job must not notice an upgrade: so the
launcher writes this text into the attempt's boot/ folder, from where `sitecustomize.py` loads it. The text
holds the sources of the modules and an importer that serves them from memory as the package `_oomscope_job`;
tracebacks show their lines as usual. This module runs in oomscope's own interpreter; it is not part of the
text.
"""

from __future__ import annotations

import functools
from pathlib import Path

#: Name of the package in the job.
PACKAGE = "_oomscope_job"

_ROOT = Path(__file__).resolve().parent.parent

#: What every job gets. `agent/apply` holds the run-time side of the fixes.
_AGENT_PARTS = ("units.py", "errors.py", "protocol", "agent")
#: What a job on a simulated device gets in addition.
_SIMULATE_PARTS = ("simulate", "core/__init__.py", "core/allocator/__init__.py", "core/allocator/model*.py")
#: Files of these packages that run on our side only.
_OUR_SIDE = ("agent/bundle.py", "agent/boot/")

_HEADER = '''\
"""oomscope's agent, made by oomscope {version}. Do not edit: every launch writes it anew."""

import sys

PACKAGE = {package!r}
MODULES = {{}}


class Importer:
    """Finds and loads the modules of PACKAGE in MODULES: name -> (is package, source)."""

    serves = PACKAGE

    def __init__(self, folder):
        self.folder = folder

    def find_spec(self, name, path=None, target=None):
        if name not in MODULES:
            return None
        from importlib.machinery import ModuleSpec

        is_package, _ = MODULES[name]
        spec = ModuleSpec(name, self, origin=self.get_filename(name), is_package=is_package)
        spec.has_location = True
        return spec

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        name = module.__spec__.name
        code = compile(self.get_source(name), self.get_filename(name), "exec", dont_inherit=True)
        exec(code, module.__dict__)

    def get_filename(self, name):
        is_package, _ = MODULES[name]
        return self.folder + "/" + name.replace(".", "/") + ("/__init__.py" if is_package else ".py")

    def get_source(self, name):
        return MODULES[name][1]

    def is_package(self, name):
        return MODULES[name][0]


def install():
    """Make `import {package}` work in this process; safe to call twice."""
    if not any(getattr(finder, "serves", None) == PACKAGE for finder in sys.meta_path):
        sys.meta_path.insert(0, Importer(__file__.rpartition("/")[0]))


def start(folder):
    """Start the agent; `folder` holds agent.json."""
    install()
    from {package}.agent.bootstrap import start as start_agent

    start_agent(folder)


'''


def module_files(*, simulate: bool) -> dict[str, Path]:
    """Module name inside the package -> file, sorted by name."""
    found: dict[str, Path] = {}
    for part in _AGENT_PARTS + (_SIMULATE_PARTS if simulate else ()):
        for path in sorted(_ROOT.glob(part)):
            for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
                relative = file.relative_to(_ROOT).as_posix()
                if not relative.startswith(_OUR_SIDE) and "/." not in relative:
                    found[_module_name(relative)] = file
    return dict(sorted(found.items()))


@functools.lru_cache(maxsize=2)
def source(*, simulate: bool = False) -> str:
    """The whole text; with `simulate`, the simulated device and the allocator model are part of it."""
    from oomscope import __version__

    parts = [_HEADER.format(version=__version__, package=PACKAGE)]
    parts.append(f"MODULES[PACKAGE] = (True, {_package_source(__version__)!r})\n")
    for name, file in module_files(simulate=simulate).items():
        text = file.read_text(encoding="utf-8")
        parts.append(f"MODULES[{f'{PACKAGE}.{name}'!r}] = ({file.name == '__init__.py'}, {text!r})\n")
    return "".join(parts)


def sitecustomize() -> str:
    """The bootstrap that stands first on the job's PYTHONPATH."""
    return (_ROOT / "agent" / "boot" / "sitecustomize.py").read_text(encoding="utf-8")


def _package_source(version: str) -> str:
    return f'"""The part of oomscope that runs in the job."""\n\n__version__ = {version!r}\n'


def _module_name(relative: str) -> str:
    name = relative[: -len(".py")].replace("/", ".")
    return name[: -len(".__init__")] if name.endswith(".__init__") else name
