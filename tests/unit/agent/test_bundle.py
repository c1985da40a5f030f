import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from oomscope.agent import bundle

ROOT = Path(bundle.__file__).parents[1]


def test_the_agent_brings_what_it_imports():
    names = bundle.module_files(simulate=False)
    assert {"agent", "agent.bootstrap", "protocol.records", "units"} <= set(names)
    assert "agent.bundle" not in names
    assert not any(name.startswith(("simulate", "core", "store")) for name in names)


def test_a_simulated_job_gets_the_device_and_the_allocator_model():
    names = bundle.module_files(simulate=True)
    assert {"simulate", "core", "core.allocator", "core.allocator.model"} <= set(names)
    assert "core.allocator.synth" not in names


@pytest.mark.parametrize("name", sorted(bundle.module_files(simulate=True)))
def test_every_module_of_the_job_is_python_3_9_and_imports_relatively(name):
    tree = ast.parse(bundle.module_files(simulate=True)[name].read_text(), feature_version=(3, 9))
    for node in ast.walk(tree):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            modules = [node.module]
        assert not any(module.split(".")[0] == "oomscope" for module in modules), f"line {node.lineno}"


def test_the_bootstrap_is_plain_old_python():
    text = bundle.sitecustomize()
    assert "f'" not in text
    assert 'f"' not in text
    tree = ast.parse(text)
    assert not any(
        isinstance(node, (ast.AnnAssign, ast.NamedExpr, ast.AsyncFunctionDef)) for node in ast.walk(tree)
    )
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert all(not function.returns and not function.args.kwonlyargs for function in functions)


_USE = """
import json, linecache, sys, traceback
namespace = {"__name__": "bundle", "__file__": sys.argv[1]}
exec(compile(open(sys.argv[1]).read(), sys.argv[1], "exec"), namespace)
namespace["install"](); namespace["install"]()
import _oomscope_job
from _oomscope_job.units import format_bytes, parse_size
import _oomscope_job.agent.identity as identity
try:
    parse_size("x")
except ValueError:
    text = traceback.format_exc()
importers = sum(type(finder).__name__ == "Importer" for finder in sys.meta_path)
print(json.dumps([_oomscope_job.__version__, format_bytes(2048), text, importers, "torch" in sys.modules]))
"""


def test_the_text_alone_is_an_importable_package_with_tracebacks(tmp_path):
    path = tmp_path / "_oomscope_job.py"
    path.write_text(bundle.source())
    command = [sys.executable, "-S", "-E", "-c", _USE, str(path)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    version, size, text, importers, torch = json.loads(answer.stdout)
    assert version == __import__("oomscope").__version__
    assert size == "2.00 KiB"
    assert "_oomscope_job/units.py" in text
    assert "raise ValueError" in text, "the traceback shows the source line"
    assert importers == 1
    assert not torch
