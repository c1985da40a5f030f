# mypy: ignore-errors
# oomscope's bootstrap. It runs in every Python process of the job, so it uses no annotations and no new syntax (tools of
# the job's environment may be old), imports nothing that the interpreter has not loaded, never raises, and never prints.
# It lets the user's own sitecustomize run exactly as it would have, and otherwise only waits for `import torch`.
def _oomscope_boot():
    import os
    import sys

    here = os.path.dirname(os.path.abspath(__file__))
    # Hide this folder, so that the interpreter finds the sitecustomize that would have run without us. It stays hidden:
    # torch.compile hands sys.path to its workers, and those are not ranks.
    for index in reversed([i for i, p in enumerate(sys.path) if p and os.path.abspath(p) == here]):
        del sys.path[index]
    mine = sys.modules.pop("sitecustomize", None)
    user_error = None
    try:
        import sitecustomize  # noqa: F401
    except ImportError as error:
        if getattr(error, "name", None) != "sitecustomize":
            user_error = error
    except BaseException as error:
        user_error = error
    if "sitecustomize" not in sys.modules:
        sys.modules["sitecustomize"] = mine
    try:
        if not os.environ.get("OOMSCOPE_AGENT_OFF") and sys.version_info >= (3, 9):
            _oomscope_wait_for_torch(here, sys)
    except BaseException:
        if os.environ.get("OOMSCOPE_DEBUG"):
            import traceback

            traceback.print_exc()
    if user_error is not None:
        raise user_error  # site.py reports it, as it would have


def _oomscope_wait_for_torch(here, sys):
    state = {"busy": False, "namespace": None}

    def bundle():
        if state["namespace"] is None:
            path = here + "/_oomscope_job.py"
            with open(path, "rb") as stream:
                source = stream.read()
            namespace = {"__name__": "_oomscope_job_bundle", "__file__": path}
            exec(compile(source, path, "exec"), namespace)
            state["namespace"] = namespace
            namespace["install"]()
        return state["namespace"]

    class Loader(object):
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def create_module(self, spec):
            return self.inner.create_module(spec)

        def exec_module(self, module):
            # Give the module its real loader back first: pkgutil, inspect and importlib.resources see nothing odd.
            module.__spec__.loader = module.__loader__ = self.inner
            self.inner.exec_module(module)
            try:
                # torch is complete. Say so: a thread of the autograd engine that imports it would otherwise wait for this
                # thread, which may be waiting for that thread.
                module.__spec__._initializing = False
                bundle()["start"](here)
            except Exception:
                import os

                if os.environ.get("OOMSCOPE_DEBUG"):
                    import traceback

                    traceback.print_exc()

    class Finder(object):
        def find_spec(self, name, path=None, target=None):
            if state["busy"]:
                return None
            if name == "_oomscope_job":  # an object of ours that was pickled for a child process
                state["busy"] = True
                try:
                    bundle()
                    for finder in sys.meta_path:
                        spec = getattr(finder, "find_spec", lambda *a: None)(name, path, target)
                        if spec is not None:
                            return spec
                finally:
                    state["busy"] = False
                return None
            if name != "torch":
                return None
            state["busy"] = True
            try:
                for finder in list(sys.meta_path):
                    if finder is self or not hasattr(finder, "find_spec"):
                        continue
                    spec = finder.find_spec(name, path, target)
                    if spec is not None:
                        if hasattr(spec.loader, "exec_module"):
                            spec.loader = Loader(spec.loader)
                        return spec
            finally:
                state["busy"] = False
            return None

    sys.meta_path.insert(0, Finder())


_oomscope_boot()
