"""`oomscope fix`: list, preview, adopt and undo the fixes of a session."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oomscope.errors import FixError, InputError, PatchDoesNotApply, SessionError

if TYPE_CHECKING:
    from oomscope.launch.patches import PatchSet
    from oomscope.store.session import Attempt, Session


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("session")
@click.option(
    "--attempt", "number", type=click.IntRange(min=1), metavar="N", help="Of attempt N (default: the first)."
)
@click.option("--predict", "again", is_flag=True, help="Predict again, or what was not predicted yet.")
@click.option("--only", metavar="ID,…", help="With --predict: look at these fixes only.")
@click.option("--all", "show_all", is_flag=True, help="Also list fixes that do not apply, with the reason.")
@click.option(
    "--apply", "adopt", metavar="ID,…", help="Adopt fixes: change the source files, or write a plan file."
)
@click.option(
    "--write-patch", type=click.Path(dir_okay=False), metavar="FILE", help="With --apply: write a diff."
)
@click.option(
    "--plan", "plan_path", type=click.Path(dir_okay=False), metavar="FILE", help="With --apply: write a plan."
)
@click.option("--undo", "take_back", is_flag=True, help="Restore the files of the last applied patch.")
@click.option("-y", "--yes", is_flag=True, help="Change files without asking.")
@click.option("--json", "as_json", is_flag=True, help="Print one oomscope.fixes/1 object on stdout.")
def fix(session: str, **options: Any) -> int:
    """List, preview, apply or undo fixes for a session.

    \b
    oomscope fix 3f9c                              the fixes with their predictions
    oomscope fix 3f9c --apply ckpt --write-patch f.diff    a diff that git apply takes
    oomscope fix 3f9c --apply ckpt                 change the files (asks first)
    oomscope fix 3f9c --apply ckpt --plan oomscope.toml    for oomscope run --plan
    oomscope fix 3f9c --undo                       restore the files
    """  # noqa: D301
    from oomscope.store import library

    found = library.find(session)
    if options["take_back"]:
        return _undo(found)
    attempt = _attempt(found, options["number"])
    only = _known(_ids(options["only"]))
    if options["adopt"]:
        return _adopt(found, attempt, _ids(options["adopt"]), options)
    if options["write_patch"] or options["plan_path"]:
        raise FixError(
            "--write-patch and --plan need --apply", hint="for example --apply ckpt --write-patch fix.diff"
        )
    fixes = _fixes(found, attempt, again=options["again"], only=only, quiet=options["as_json"])
    if options["as_json"]:
        click.echo(json.dumps(fixes, indent=1, ensure_ascii=False))
    else:
        from oomscope.report.fixes import text

        click.echo(text(fixes, show_all=options["show_all"]))
    return 0


def _ids(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())


def _known(ids: tuple[str, ...]) -> tuple[str, ...]:
    """`ids` when each names a fix of ours or of a plugin; FixError otherwise."""
    from oomscope.launch.predict_catalogue import find

    for each in ids:
        find(each)
    return ids


def _attempt(session: Session, number: int | None) -> Attempt:
    attempts = session.attempts()
    wanted = [each for each in attempts if number in (None, each.number)]
    if not wanted:
        known = ", ".join(str(each.number) for each in attempts) or "none"
        raise SessionError(
            f"{session.path.name} has no attempt {number or ''}".rstrip(), hint=f"attempts: {known}"
        )
    predicted = [each for each in wanted if each.fixes()]
    return (predicted or wanted)[0]


def _fixes(
    session: Session, attempt: Attempt, *, again: bool, only: tuple[str, ...], quiet: bool
) -> dict[str, Any]:
    """The stored predictions; made now when there are none, or when asked for."""
    stored = attempt.fixes()
    if stored is not None and not again:
        return stored
    from oomscope.launch.predict import predict
    from oomscope.protocol import layout
    from oomscope.simulate.cards import resolve
    from oomscope.store.files import write_json

    device = attempt.info().get("device")
    made = predict(
        session,
        attempt,
        card=resolve(device) if device else None,
        only=only or None,
        on_progress=lambda name, done, total: None if quiet else click.echo(f"predicted {name}", err=True),
    )
    if stored is not None and only:
        made = _merged(stored, made)
    write_json(attempt.path / layout.FIXES_FILE, made)
    return made


def _merged(stored: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
    """New predictions of some fixes in the place of the stored ones."""
    new = {entry["id"]: entry for entry in made["fixes"]}
    entries = [new.pop(entry["id"], entry) for entry in stored["fixes"]]
    plans = [plan for plan in made["plans"] if plan not in stored["plans"]]
    return {**stored, "fixes": [*entries, *new.values()], "plans": [*stored["plans"], *plans]}


def _adopt(session: Session, attempt: Attempt, ids: tuple[str, ...], options: dict[str, Any]) -> int:
    """Write a diff, a plan file, or the user's files."""
    from oomscope.launch.predict import launch_changes

    changes = launch_changes(ids, attempt)
    if options["plan_path"]:
        from oomscope.launch.plan_file import write_plan

        with _writing(options["plan_path"]):
            write_plan(Path(options["plan_path"]), ids)
        click.echo(
            f"wrote {options['plan_path']}; oomscope run --plan {options['plan_path']} applies it", err=True
        )
        return 0
    patches, settings = _patches(session, attempt, ids)
    if options["write_patch"]:
        with _writing(options["write_patch"]):
            Path(options["write_patch"]).write_text(patches.diff, encoding="utf-8", newline="")
        click.echo(
            f"wrote {options['write_patch']}; in {patches.root}: git apply {options['write_patch']}", err=True
        )
    elif patches.files:
        _in_place(session, attempt, patches, sure=options["yes"])
    for note in patches.notes:
        click.echo(f"to do by hand: {note}", err=True)
    for fix_id in settings:
        entry: dict[str, Any] = next(
            (each for each in (attempt.fixes() or {}).get("fixes", ()) if each["id"] == fix_id), {}
        )
        preview = entry.get("preview") or {"env": changes.env, "argv": changes.argv}
        words = [f"{key}={value}" for key, value in (preview.get("env") or {}).items()]
        words += preview.get("argv") or []
        how = " ".join(words) or "no source patch; keep it in a plan file: --plan oomscope.toml"
        click.echo(f"{fix_id}: {how}", err=True)
    return 0


@contextmanager
def _writing(path: str) -> Iterator[None]:
    """Say in one sentence that a file of the user's choice cannot be written."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot write {path}: {error.strerror}", hint="name a file in a folder that you may write"
        ) from error


def _patches(session: Session, attempt: Attempt, ids: tuple[str, ...]) -> tuple[PatchSet, list[str]]:
    """The patches of those fixes that have one, and the other fixes."""
    from oomscope.core.fixes.patches import PATCHES
    from oomscope.launch.patches import PatchSet, make_patches, script_of

    stored = {entry["id"]: entry for entry in (attempt.fixes() or {}).get("fixes", ())}
    settings = [each for each in ids if each not in PATCHES]
    wanted = [each for each in ids if each in PATCHES]
    info = session.attempts()[0].info()
    cwd = Path(info.get("cwd") or session.info.get("cwd") or ".")
    script = script_of(info.get("command") or session.info.get("command") or (), cwd)
    if not wanted:
        return PatchSet((), (), cwd, (), ()), settings
    if script is None:
        raise PatchDoesNotApply("the command of this session names no script that still exists")
    known = {each: ((stored.get(each) or {}).get("plan") or {}).get("patch_options") or {} for each in wanted}
    return make_patches(wanted, script, cwd, known), settings


def _in_place(session: Session, attempt: Attempt, patches: PatchSet, *, sure: bool) -> None:
    from oomscope.launch.patches import apply_in_place

    click.echo(patches.diff, nl=False)
    if not sure and not click.confirm(f"change {len(patches.files)} file(s)?", err=True):
        raise click.Abort
    kept = apply_in_place(session, attempt, patches, _started(attempt))
    for change in patches.changes:
        click.echo(change, err=True)
    click.echo(
        f"the diff is kept in {kept}; oomscope fix {session.path.name} --undo restores the files", err=True
    )


def _started(attempt: Attempt) -> int | None:
    """When the attempt started, in nanoseconds since the epoch."""
    from oomscope.launch.predict_facts import records_of_rank

    times = [int(record["t"]) for record in records_of_rank(attempt.path) if record.get("k") == "hello"]
    return min(times, default=None)


def _undo(session: Session) -> int:
    from oomscope.launch.patches import undo

    for path in undo(session):
        click.echo(f"restored {path}", err=True)
    return 0
