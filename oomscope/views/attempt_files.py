"""The JSON files of an attempt, read again when they change, and the views made from them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oomscope.errors import OomscopeError
from oomscope.store.files import read_json
from oomscope.store.session import Attempt
from oomscope.views import diagnosis, events, fixes


class JsonFile:
    """The object in a JSON file, read again when the file changed; {} while it is missing or unreadable."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self.value: Mapping[str, Any] = {}
        self.problem = ""

    def load(self) -> Mapping[str, Any]:
        try:
            found = self._path.stat()
        except OSError:
            self._seen, self.value, self.problem = None, {}, ""
            return self.value
        stamp = (found.st_mtime_ns, found.st_size)
        if stamp != self._seen:
            self._seen = stamp
            try:
                self.value, self.problem = read_json(self._path) or {}, ""
            except OomscopeError as error:
                self.value, self.problem = {}, error.message
        return self.value

    def trouble(self) -> events.EventLine:
        """The problem as an event."""
        return events.EventLine(self._seen[0] if self._seen else 0, "warn", self.problem)


class AttemptFiles:
    """The JSON files of one attempt and their views."""

    def __init__(self, attempt: Attempt) -> None:
        self.number = attempt.number
        self.path = attempt.path
        self._files = {
            name: JsonFile(attempt.path / f"{name}.json")
            for name in ("attempt", "result", "findings", "fixes", "proof")
        }
        self._views: dict[str, tuple[int, Any]] = {}

    def load(self, name: str) -> Mapping[str, Any]:
        return self._files[name].load()

    def problems(self) -> list[events.EventLine]:
        """Files that cannot be read, each at the time of its last change."""
        return [file.trouble() for file in self._files.values() if file.problem]

    def diagnosis(self) -> diagnosis.Diagnosis | None:
        data = self.load("findings")
        if not data:
            return None
        found: diagnosis.Diagnosis = self._view(
            "findings", data, lambda d: diagnosis.read(d, attempt=self.number)
        )
        return found

    def fixes(self) -> fixes.Fixes | None:
        data = self.load("fixes")
        if not data:
            return None
        found: fixes.Fixes = self._view("fixes", data, fixes.read)
        return found

    def _view(self, name: str, data: Mapping[str, Any], make: Any) -> Any:
        kept = self._views.get(name)
        if kept is None or kept[0] != id(data):
            kept = self._views[name] = (id(data), make(data))
        return kept[1]
