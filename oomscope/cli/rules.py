"""`oomscope rules`: the causes oomscope knows, and the page of one."""

from __future__ import annotations

import json
from difflib import get_close_matches

import click

from oomscope.errors import UsageError


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_context
def rules(ctx: click.Context, as_json: bool) -> None:
    """List the causes oomscope knows, or show the page of one."""
    if ctx.invoked_subcommand is None:
        _list(as_json)


def _list(as_json: bool) -> None:
    from oomscope.core.diagnosis.flow import QUESTIONS
    from oomscope.core.diagnosis.rules import BUILT_IN

    if as_json:
        rows = [
            {
                "rule": r.id,
                "cause": r.cause,
                "title": r.title,
                "needs": r.needs,
                "node": r.node,
                "fixes": list(r.fixes),
            }
            for r in BUILT_IN
        ]
        click.echo(json.dumps({"schema": "oomscope.rules/1", "rules": rows}, indent=1))
        return
    for question in QUESTIONS:
        mine = [rule for rule in BUILT_IN if rule.node == question.node]
        if mine:
            click.echo(question.text)
            for rule in mine:
                click.echo(f"  {rule.id:<28} {rule.title}")


@rules.command("list")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def list_(as_json: bool) -> None:
    """List all rules."""
    _list(as_json)


@rules.command()
@click.argument("rule_id")
def show(rule_id: str) -> None:
    """Show the page of RULE_ID: symptom, mechanism, how it is decided, fixes, sources."""
    from oomscope.core.diagnosis.pages import page
    from oomscope.core.diagnosis.rules import BUILT_IN, by_id

    rule = by_id(rule_id)
    if rule is None:
        names = [name for each in BUILT_IN for name in (each.id, each.cause)]
        near = get_close_matches(rule_id, names, n=1)
        hint = f"did you mean {near[0]}?" if near else "oomscope rules lists them"
        raise UsageError(f"no rule {rule_id!r}", hint=hint)
    click.echo(page(rule), nl=False)
