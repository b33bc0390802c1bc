"""What a configuration would run, printed before anything runs: placement, layouts, and the batch arithmetic."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from megarl.config import PPOConfig


def print_plan(config: PPOConfig, console: Console | None = None) -> None:
    """Prints who runs where, and what a step does."""
    out = console or Console(highlight=False)
    table = Table("role", "group", "devices", "TP", "PP", "VPP", "DP", "SP", "tokens/micro-batch", box=None)
    for row in placement_rows(config):
        table.add_row(*row)
    out.print(table)
    for line in batch_lines(config):
        out.print(line, soft_wrap=True)


def placement_rows(config: PPOConfig) -> Iterator[tuple[str, ...]]:
    """A row per role, the rollout last."""
    for name, group in config.groups.items():
        for role, settings in group.roles.items():
            layout = config.layout(role)
            sizes = (str(size) for size in (layout.tp, layout.pp, layout.vpp, layout.dp))
            sequence = "yes" if layout.sequence_parallel else "no"
            yield (role, name, group.devices, *sizes, sequence, str(settings.tokens_per_micro_batch))
    rollout = config.rollout
    yield ("rollout", "", rollout.devices, str(rollout.tp), "", "", str(rollout.engines), "", "")


def batch_lines(config: PPOConfig) -> Iterator[str]:
    """What a step has of samples, tokens and optimizer steps."""
    data, algo, rollout = config.data, config.algo, config.rollout
    samples = data.prompts_per_step * data.samples_per_prompt
    yield f"step         {data.prompts_per_step} prompts x {data.samples_per_prompt} = {samples} samples"
    yield f"lengths      up to {rollout.max_new_tokens} new tokens, {rollout.max_model_len} with the prompt"
    yield (
        f"update       {algo.ppo_epochs} epochs x {algo.mini_batches} mini-batches of "
        f"{samples // algo.mini_batches} samples = {algo.ppo_epochs * algo.mini_batches} optimizer steps"
    )
    yield f"run          {config.run.steps} steps, {config.run.steps * samples} samples, into {config.run.dir}"
