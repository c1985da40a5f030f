"""Source patches on files: found, shown, tried on a copy, applied to the user's files, and undone.

A user's file is never lost: it is refused when it changed since the failed run or has uncommitted changes, written to a
temporary name and renamed, and its original stays in the session.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import tempfile
import tokenize
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oomscope.core.fixes.patches import PATCHES, patch
from oomscope.core.fixes.patches.text import unified_diff
from oomscope.errors import PatchDoesNotApply
from oomscope.launch.patch_files import local_modules
from oomscope.store.files import LineWriter
from oomscope.store.session import Attempt, Session
from oomscope.store.tail import read_records

#: Journal of patches applied to the user's files, in the session folder.
JOURNAL = "patches.jsonl"
#: Below an attempt: diffs, and originals of the files they changed.
PATCH_DIR = "fixes"
#: Below an attempt or a prediction: a copy of the script's folder with patches applied.
SOURCE_DIR = "source"


@dataclass(frozen=True, slots=True)
class FilePatch:
    """One changed file."""

    path: Path
    before: bytes
    after: bytes
    diff: str


@dataclass(frozen=True, slots=True)
class PatchSet:
    """What the patches of some fixes change together."""

    fixes: tuple[str, ...]
    files: tuple[FilePatch, ...]
    root: Path
    """Folder that the names in the diff are relative to: where `git apply` is run."""
    changes: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def diff(self) -> str:
        return "".join(each.diff for each in self.files)


def make_patches(
    fixes: Sequence[str], script: Path, cwd: Path, options: Mapping[str, Mapping[str, Any]]
) -> PatchSet:
    """Apply the source patches of `fixes` one after the other, in memory.

    Args:
        fixes: ids with a source patch.
        script: the training script; its own folder is searched for the modules it imports.
        cwd: where the job ran.
        options: fix id -> options of its patch.

    Raises:
        PatchDoesNotApply: a fix has no patch, or no file is in a form that it understands.
    """
    contents = {path: _read(path) for path in (script, *local_modules(script))}
    changed: dict[Path, str] = {}
    changes: list[str] = []
    notes: list[str] = []
    for fix in fixes:
        path, result = _patch_one(
            fix, script, {p: changed.get(p, _decode(c)) for p, c in contents.items()}, options
        )
        changed[path] = result.code
        changes += [f"{path.name}: {each}" for each in result.changes]
        notes += result.notes
    root = git_root(script) or cwd
    files = [_file_patch(path, contents[path], code, root) for path, code in changed.items()]
    return PatchSet(
        tuple(fixes), tuple(each for each in files if each.diff), root, tuple(changes), tuple(notes)
    )


def _patch_one(
    fix: str, script: Path, sources: Mapping[Path, str], options: Mapping[str, Mapping[str, Any]]
) -> tuple[Path, Any]:
    if fix not in PATCHES:
        raise PatchDoesNotApply(f"{fix} has no source patch", hint=f"fixes with one: {', '.join(PATCHES)}")
    wanted = dict(options.get(fix) or {})
    place = wanted.pop("file", None)
    candidates = [path for path in sources if place is None or path.resolve() == Path(place).resolve()]
    if not candidates:
        raise PatchDoesNotApply(f"{fix}: {place} is not a file of this script", hint="change it by hand")
    reasons = []
    for path in candidates:
        try:
            return path, patch(fix, sources[path], wanted)
        except PatchDoesNotApply as error:
            reasons.append(error.message)
    raise PatchDoesNotApply(
        f"{fix}: {reasons[0]}", hint=f"files looked at: {', '.join(p.name for p in candidates)}"
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PatchDoesNotApply(f"cannot read {path}: {error.strerror}") from error


def _encoding(content: bytes) -> str:
    return tokenize.detect_encoding(io.BytesIO(content).readline)[0]


def _decode(content: bytes) -> str:
    try:
        return content.decode(_encoding(content))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise PatchDoesNotApply("a file is not text in the encoding that it declares") from error


def _file_patch(path: Path, before: bytes, code: str, root: Path) -> FilePatch:
    after = code.encode(_encoding(before))
    name = os.path.relpath(path.resolve(), root.resolve()).replace(os.sep, "/")
    return FilePatch(path, before, after, unified_diff(name, _decode(before), code))


def git_root(path: Path) -> Path | None:
    """The top of the git work tree that `path` is in, or None."""
    answer = _git(path.parent, "rev-parse", "--show-toplevel")
    return Path(answer.strip()) if answer and answer.strip() else None


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def why_not_in_place(patches: PatchSet, started_ns: int | None) -> str | None:
    """Why the user's files must not be changed now, or None.

    Args:
        patches: what would be changed.
        started_ns: when the failed run started; a file changed later is not the one that was diagnosed.
    """
    for each in patches.files:
        if _read(each.path) != each.before:
            return f"{each.path} changed since the patch was made"
        if started_ns is not None and each.path.stat().st_mtime_ns > started_ns:
            return f"{each.path} changed since the failed run: run the script again first"
        state = _git(each.path.parent, "status", "--porcelain", "--", each.path.name)
        if state and not state.startswith("??"):
            return f"{each.path} has changes that are not committed: commit or stash them first"
    return None


def apply_in_place(session: Session, attempt: Attempt, patches: PatchSet, started_ns: int | None) -> Path:
    """Change the user's files; returns the diff as it is kept in the session.

    Raises:
        PatchDoesNotApply: a file changed since the run, or has uncommitted changes.
    """
    reason = why_not_in_place(patches, started_ns)
    if reason:
        raise PatchDoesNotApply(reason, hint="oomscope fix SESSION --write-patch FILE writes a diff instead")
    folder = attempt.path / PATCH_DIR
    number = 1 + len(list(folder.glob("*.patch"))) if folder.is_dir() else 1
    originals = folder / f"{number:04d}"
    originals.mkdir(parents=True, mode=0o700)
    kept = folder / f"{number:04d}.patch"
    kept.write_text(patches.diff, encoding="utf-8")
    entries = []
    for index, each in enumerate(patches.files):
        original = originals / f"{index}-{each.path.name}"
        original.write_bytes(each.before)
        _copy_time(each.path, original)
        entries.append(
            {
                "path": str(each.path.resolve()),
                "original": str(original.relative_to(session.path)),
                "before": _digest(each.before),
                "after": _digest(each.after),
            }
        )
    journal = LineWriter(session.path / JOURNAL)
    name = str(kept.relative_to(session.path))
    journal.append({"k": "patching", "patch": name, "fixes": list(patches.fixes), "files": entries})
    for each in patches.files:
        replace_file(each.path, each.after)
    journal.append({"k": "patched", "patch": name})
    return kept


def undo(session: Session) -> list[Path]:
    """Restore the files of the last patch that was not undone; returns them.

    Raises:
        PatchDoesNotApply: nothing to undo, or a file was changed after the patch.
    """
    records = read_records(session.path / JOURNAL)
    undone = {record.get("patch") for record in records if record.get("k") == "undone"}
    last = next(
        (r for r in reversed(records) if r.get("k") == "patching" and r.get("patch") not in undone), None
    )
    if last is None:
        raise PatchDoesNotApply(f"no patch of this session is applied ({session.path.name})")
    restored = []
    for entry in last["files"]:
        path = Path(entry["path"])
        digest = _digest(_read(path))
        if digest == entry["before"]:
            continue  # the patch was interrupted before it reached this file
        if digest != entry["after"]:
            raise PatchDoesNotApply(
                f"{path} changed after the patch: nothing was restored",
                hint=f"the original is {session.path / entry['original']}",
            )
        restored.append((path, session.path / entry["original"]))
    for path, original in restored:
        replace_file(path, original.read_bytes())
        _copy_time(original, path)  # it is the file of the failed run again, and so is its time of change
    LineWriter(session.path / JOURNAL).append({"k": "undone", "patch": last["patch"]})
    return [path for path, _ in restored]


def replace_file(path: Path, content: bytes) -> None:
    """Write `content` so that a reader sees the old file or the whole new one; the mode stays, links are followed."""
    target = path.resolve()
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(target, temporary)
        os.replace(temporary, target)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise


def _copy_time(source: Path, target: Path) -> None:
    """Give `target` the time of change of `source`."""
    status = source.stat()
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def stage(patches: PatchSet, script: Path, folder: Path) -> Path:
    """A copy of the script's folder with the patches applied, for a trial; returns the script in it.

    Everything but the script, the changed files and the folders above them is a link to the original, so that data
    beside the script is found.

    Raises:
        PatchDoesNotApply: a changed file lies outside the script's folder.
    """
    base = script.resolve().parent
    wanted = {each.path.resolve(): each.after for each in patches.files}
    wanted.setdefault(script.resolve(), _read(script))
    for path in wanted:
        if base not in path.parents:
            raise PatchDoesNotApply(f"{path} is outside the script's folder: it is not tried on a copy")
    _mirror(base, folder, wanted)
    return folder / script.resolve().name


def _mirror(source: Path, target: Path, wanted: Mapping[Path, bytes]) -> None:
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    for entry in source.iterdir():
        place = target / entry.name
        if place.exists() or place.is_symlink() or entry.name == "__pycache__":
            continue
        if entry in wanted:
            place.write_bytes(wanted[entry])
        elif any(entry in path.parents for path in wanted):
            _mirror(entry, place, wanted)
        else:
            place.symlink_to(entry)


def script_of(command: Iterable[str], cwd: Path) -> Path | None:
    """The training script that a command line names, or None."""
    for word in command:
        path = cwd / word
        if word.endswith(".py") and path.is_file():
            return path
    return None


def command_with(command: Sequence[str], script: Path, cwd: Path, replacement: Path) -> tuple[str, ...]:
    """`command` with another file in place of the script."""
    return tuple(
        str(replacement) if word.endswith(".py") and cwd / word == script else word for word in command
    )
