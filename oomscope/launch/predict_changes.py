"""What a rerun changes for a set of fixes: environment, plan, command line; or why that is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from oomscope.core.fixes import Fix, JobFacts
from oomscope.core.fixes.environment import (
    OLD_NAME,
    merge_allocator_settings,
    split_settings,
    why_not_expandable,
)
from oomscope.core.fixes.model import Plan, merge_runtime
from oomscope.core.fixes.search import compatible
from oomscope.errors import FixError
from oomscope.launch.job import JobSpec
from oomscope.launch.patches import SOURCE_DIR
from oomscope.launch.predict_catalogue import find
from oomscope.launch.predict_facts import current_environment
from oomscope.launch.predict_patches import is_patch_only, staged_command
from oomscope.store.session import Attempt, Session


@dataclass(frozen=True)
class Changes:
    """What a rerun changes against the command as the user gave it."""

    env: dict[str, str] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=lambda: {"fixes": []})
    argv: list[str] = field(default_factory=list)
    patches: list[str] = field(default_factory=list)
    """Fixes that only a source patch applies: the command has to run a patched copy, see `patched_command`."""
    patch_options: dict[str, dict[str, Any]] = field(default_factory=dict)


def launch_changes(
    ids: Iterable[str], attempt: Attempt | None, *, env: Mapping[str, str] | None = None
) -> Changes:
    """What a rerun with the fixes `ids` changes.

    Args:
        ids: fixes to apply together.
        attempt: the attempt whose predictions they come from; None: nothing was predicted.
        env: the job's environment without any fix; None: ours.

    Raises:
        FixError: an unknown fix, one that does not apply, is active already, is only advice, or a conflict.
    """
    chosen = [find(each) for each in dict.fromkeys(ids)]
    fixes = {fix.id: fix for fix in chosen}
    conflict = compatible([fix.id for fix in chosen], fixes)
    if conflict:
        raise FixError(conflict, hint="choose one of them")
    stored = {entry["id"]: entry for entry in ((attempt.fixes() if attempt else None) or {}).get("fixes", ())}
    facts = JobFacts(env=current_environment(env))
    settings: dict[str, str] = {}
    other: dict[str, str] = {}
    plans: list[Plan] = []
    argv: list[str] = []
    patches: list[str] = []
    patch_options: dict[str, dict[str, Any]] = {}
    for fix in chosen:
        plan = _plan_of(fix, stored.get(fix.id), facts)
        settings.update(split_settings(plan.env.get(OLD_NAME, "")))
        other.update({key: value for key, value in plan.env.items() if key != OLD_NAME})
        plans.append(plan)
        argv += plan.argv
        if is_patch_only(fix):
            patches.append(fix.id)
            entry = (stored.get(fix.id) or {}).get("plan") or {}
            patch_options[fix.id] = dict(entry.get("patch_options") or {})
    if settings:
        other.update(merge_allocator_settings(facts.env, settings, facts.torch_version))
    plan_json = {
        "fixes": [{"id": fix, "options": dict(options)} for fix, options in merge_runtime(plans).items()]
    }
    return Changes(other, plan_json, argv, patches, patch_options)


def patched_command(changes: Changes, spec: JobSpec, session: Session) -> tuple[str, ...]:
    """The command of `spec`, running a patched copy of the script when `changes` has source patches.

    Raises:
        PatchDoesNotApply: the script is no longer what the patch was made for.
    """
    if not changes.patches:
        return spec.command
    folder = session.path / SOURCE_DIR / "-".join(sorted(changes.patches))
    return staged_command(changes.patches, changes.patch_options, spec, folder)


def _plan_of(fix: Fix, entry: Mapping[str, Any] | None, facts: JobFacts) -> Plan:
    if fix.advice:
        raise FixError(f"{fix.id} is advice: oomscope does not apply it by itself", hint=fix.title)
    if fix.id == "expandable":
        reason = why_not_expandable(facts.env, None, facts.platform)
        if reason:
            raise FixError(f"expandable refused: {reason}")
    if entry is not None and not entry.get("applicable"):
        raise FixError(f"{fix.id} refused: {entry.get('why_not') or 'it does not apply to this job'}")
    stored = (entry or {}).get("plan")
    if stored:
        return Plan(
            env=stored.get("env") or {},
            runtime=stored.get("runtime") or {},
            argv=tuple(stored.get("argv") or ()),
            patch=stored.get("patch"),
        )
    return fix.plan(facts)
