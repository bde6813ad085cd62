"""``mrv1 policy``: show a head policy, write one to a file, compare two."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from mrv1.cli.console import Command, Group, check_target, say, show, show_table
from mrv1.cli.options import MODEL_HELP, command
from mrv1.config import EngineConfig
from mrv1.errors import ConfigError
from mrv1.headwise import FULL, HeadPolicy, Visible, policy_of_ranking, policy_source
from mrv1.models import ModelConfig
from mrv1.runner.head_groups import resolve_policy

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    add_completion=False,
    help="Show, make and compare head policies.",
)

SOURCE_HELP = (
    "A rule such as ratio=0.5,window=256,sink=64 (the leading heads stream) or "
    "ranking=report.json,budget=0.5, a JSON file, or the folder of a DuoAttention pattern or of a "
    "checkpoint with FastDeploy's or RTPurbo's fields."
)
Model = Annotated[
    str | None,
    typer.Option(
        help="Model that the policy is for; a rule and a checkpoint's fields need one. "
        f"{MODEL_HELP}"
    ),
]
Instead = Annotated[
    int | None, typer.Option(help="Of the streaming heads, instead of the ranking's.")
]
Context = Annotated[
    int, typer.Option(min=1, help="Tokens of the request whose share of the cache is counted.")
]


@app.command("show", cls=Command)
@command
def show_policy(
    source: Annotated[
        str | None, typer.Argument(help=f"{SOURCE_HELP} Default: what --model would run with.")
    ] = None,
    model: Model = None,
    context: Context = 131_072,
    as_json: Annotated[bool, typer.Option("--json", help="Print the policy as JSON.")] = False,
) -> None:
    """Show which tokens each KV head sees, and how much of the cache a request then needs."""
    policy = _read(source, model)
    if as_json:
        show(json.dumps(_facts(policy, context), indent=2))
        return
    names = _names(policy)
    _show_roles(names, policy)
    table = Table("layer", "heads")
    for index, heads in enumerate(policy.heads):
        table.add_row(str(index), _row(names, heads))
    show_table(table)
    show(_share(policy, context))


@app.command("make", cls=Command)
@command
def make(
    source: Annotated[str, typer.Argument(help=SOURCE_HELP)],
    output: Annotated[
        Path, typer.Option(dir_okay=False, help="JSON file for the policy, read by --head-policy.")
    ],
    model: Model = None,
    sparsity: Annotated[
        float | None,
        typer.Option(help="Share of heads that stream, for a DuoAttention pattern. Default: 0.5."),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            help="Share of the ranked heads that stay full: the source is then a ranking, such as "
            "the report of `mrv1 calibrate`, or 'smollm2', which ships. With --context: share of "
            "the KV cache."
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(help="Tokens of the request whose KV cache takes at most the --budget."),
    ] = None,
    window: Instead = None,
    sink: Instead = None,
) -> None:
    """Write a head policy to a JSON file."""
    check_target("--output", output)
    given = None
    settings = {"budget": budget, "context": context, "window": window, "sink": sink}
    chosen = {name: value for name, value in settings.items() if value is not None}
    first = next(iter(chosen), "")
    if sparsity is not None:
        if chosen:
            raise ConfigError(
                f"policy make: expected --sparsity, of a pattern, or --{first}, of a ranking, got "
                "both"
            )
        given = HeadPolicy.of_duo_attention(source, sparsity=sparsity)
    elif chosen:
        if budget is None:
            raise ConfigError(f"policy make: expected --budget with --{first}, got none")
        given = policy_of_ranking(source, chosen)
    policy = _read(source, model, given)
    policy.save(output)
    say(f"policy of {_shape(policy)}, {policy.full_share:.0%} of them full, written to {output}")


@app.command("compare", cls=Command)
@command
def compare(
    first: Annotated[str, typer.Argument(help=SOURCE_HELP)],
    second: Annotated[str, typer.Argument(help="The policy to compare with, given likewise.")],
    model: Model = None,
    context: Context = 131_072,
) -> None:
    """Show the heads in which two policies differ, and how much of the cache each needs."""
    one, other = policies = [_read(source, model) for source in (first, second)]
    if (one.num_layers, one.num_kv_heads) != (other.num_layers, other.num_kv_heads):
        raise ConfigError(
            f"policy compare: expected policies for one model, got {_shape(one)} and "
            f"{_shape(other)}"
        )
    names = _names(*policies)
    _show_roles(names, *policies)
    table = Table(title="layers that differ")
    for heading in ("layer", "first", "second"):
        table.add_column(heading, justify="right" if heading == "layer" else "left")
    for layer, rows in enumerate(zip(one.heads, other.heads, strict=True)):
        if rows[0] != rows[1]:
            table.add_row(str(layer), *(_row(names, heads) for heads in rows))
    if table.row_count:
        show_table(table)
    pairs = [
        pair
        for rows in zip(one.heads, other.heads, strict=True)
        for pair in zip(*rows, strict=True)
    ]
    full = Counter((a.is_full, b.is_full) for a, b in pairs)
    same = sum(a == b for a, b in pairs)
    show(
        f"{same} of {len(pairs)} heads see the same; full in both: {full[True, True]}, "
        f"only in the first: {full[True, False]}, only in the second: {full[False, True]}"
    )
    for name, policy in zip(("first", "second"), policies, strict=True):
        show(f"{name}: {_share(policy, context)}")


def _read(source: str | None, model: str | None, given: HeadPolicy | None = None) -> HeadPolicy:
    """Return a policy (``given``, if read already), checked against the model if there is one.

    ``source`` names it; None = the one that the model would run with. ConfigError: it cannot be
    read, does not fit the model, or needs one.
    """
    if model is not None:
        options: dict[str, Any] = {} if source is None else {"head_policy": source}
        config = EngineConfig(model=model, **options)
        return resolve_policy(
            config, ModelConfig.from_pretrained(model), given, is_checkpoint=True
        )
    if source is None:
        raise ConfigError("policy: expected a source or --model, got neither")
    policy = given or policy_source(source).policy
    if policy is None:
        raise ConfigError(
            f"policy: expected --model, whose heads the policy is for, with {source!r}, got none"
        )
    return policy


def _facts(policy: HeadPolicy, context: int) -> dict[str, object]:
    """Return a policy as JSON; ``heads`` is that of the file that ``HeadPolicy.load`` reads."""
    return {
        "num_layers": policy.num_layers,
        "num_kv_heads": policy.num_kv_heads,
        "full_share": policy.full_share,
        "roles": [
            {"window": seen.window, "sink": seen.sink, "num_heads": count}
            for seen, count in _counts(policy).items()
        ],
        "context": context,
        "cache_share": policy.cache_share(context),
        "heads": [[list(seen) for seen in layer] for layer in policy.heads],
    }


def _counts(policy: HeadPolicy) -> dict[Visible, int]:
    """Return the number of heads of each role, in the order of ``HeadPolicy.groups``."""
    counts = Counter(seen for layer in policy.heads for seen in layer)
    return {seen: counts[seen] for seen in policy.groups}


def _share(policy: HeadPolicy, context: int) -> str:
    return (
        f"{policy.full_share:.0%} of the heads full; a request of {context:,} tokens needs "
        f"{policy.cache_share(context):.1%} of the uniform KV cache"
    )


def _shape(policy: HeadPolicy) -> str:
    return f"{policy.num_layers} layers of {policy.num_kv_heads} KV heads"


def _names(*policies: HeadPolicy) -> dict[Visible, str]:
    """Return the names of all roles: F for full heads, numbers for the others."""
    roles = dict.fromkeys(seen for policy in policies for seen in policy.groups)
    streaming = [seen for seen in roles if not seen.is_full]
    return {FULL: "F"} | {seen: str(index) for index, seen in enumerate(streaming, start=1)}


def _show_roles(names: dict[Visible, str], *policies: HeadPolicy) -> None:
    """Print what each name stands for, and how many heads of each policy have that role."""
    counts = [_counts(policy) for policy in policies]
    columns = ["heads"] if len(policies) == 1 else ["heads of the first", "of the second"]
    table = Table(title=_shape(policies[0]))
    for heading in ("role", "sees", *columns):
        table.add_column(heading, justify="right" if heading in columns else "left")
    for seen, name in names.items():
        found = [each.get(seen, 0) for each in counts]
        if any(found):
            what = f"the last {seen.window:,} tokens" if seen.window > 0 else "everything"
            if seen.sink:
                what += f" and the first {seen.sink:,}"
            table.add_row(name, what, *map(str, found))
    show_table(table)


def _row(names: dict[Visible, str], heads: tuple[Visible, ...]) -> str:
    return " ".join(names[seen] for seen in heads)
