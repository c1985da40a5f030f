"""Source patches of the fixes of one prediction: shown as a diff, and tried on a copy of the script's folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oomscope.core.fixes import Fix, How, JobFacts
from oomscope.core.fixes.patches import PATCHES
from oomscope.errors import PatchDoesNotApply
from oomscope.launch.job import JobSpec
from oomscope.launch.patches import PatchSet, command_with, make_patches, script_of, stage


def patch_options(fix_id: str, facts: JobFacts) -> dict[str, Any]:
    """What the patch of a fix has to know about this job."""
    if fix_id == "leak-detach" and facts.where is not None:
        return {"file": facts.where[0], "line": facts.where[1]}
    if fix_id in ("ckpt", "ckpt-selective", "ckpt-half", "offload-activations"):
        return {"containers": [group.path.rpartition(".")[2] for group in facts.block_groups if group.path]}
    if fix_id == "fsdp2":
        return {
            "containers": [group.path.removeprefix("module.") for group in facts.block_groups if group.path]
        }
    return {}


def is_patch_only(fix: Fix) -> bool:
    """Whether the fix has no other way than a source patch."""
    return fix.how == (How.SOURCE,)


@dataclass
class Patches:
    """The patches of the fixes that apply to one job."""

    found: dict[str, PatchSet] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    """Fix id -> why its patch does not apply."""

    @classmethod
    def of(cls, fixes: Iterable[Fix], facts: JobFacts, spec: JobSpec) -> Patches:
        """Make the patch of each fix that has one and applies."""
        made = cls()
        script = script_of(spec.command, spec.cwd)
        for fix in fixes:
            if fix.id not in PATCHES or not fix.applicable(facts).ok:
                continue
            if script is None:
                made.refused[fix.id] = "the command names no script of yours"
                continue
            try:
                options = {fix.id: patch_options(fix.id, facts)}
                made.found[fix.id] = make_patches([fix.id], script, spec.cwd, options)
            except PatchDoesNotApply as error:
                made.refused[fix.id] = error.message
        return made

    def diffs(self) -> dict[str, str]:
        return {fix: patches.diff for fix, patches in self.found.items()}


def staged_command(
    fixes: Iterable[str], options: Mapping[str, Mapping[str, Any]], spec: JobSpec, folder: Path
) -> tuple[str, ...]:
    """The command of `spec` with the patches of `fixes` applied to a copy of the script's folder in `folder`.

    Raises:
        PatchDoesNotApply: a patch does not apply, or the command names no script.
    """
    wanted = list(fixes)
    if not wanted:
        return spec.command
    script = script_of(spec.command, spec.cwd)
    if script is None:
        raise PatchDoesNotApply(
            "the command names no script of yours to patch", hint="oomscope fix --write-patch"
        )
    patches = make_patches(wanted, script, spec.cwd, options)
    return command_with(spec.command, script, spec.cwd, stage(patches, script, folder))
