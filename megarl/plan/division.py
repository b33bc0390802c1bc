"""How to divide devices between engines and trainers, and what staleness brings: estimates from their rates."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from megarl.config import PPOConfig, RAFTConfig, parse_devices
from megarl.plan.rates import Rates
from megarl.plan.simulation import SimulatedRun, StepEstimate

_STALENESS = (0, 1, 2, 4)
_ROWS = 8
_WIDTH = 120
_LEGEND = """\
Seconds per step, and the parts of it in which engines and trainers are idle. Both are as fast as the rates whatever the
division: the cost of more ranks, of waits within a step and of prefills after an update comes on top."""


@dataclass(frozen=True, kw_only=True, order=True)
class Division:
    """Numbers of devices of engines and trainers, which may take turns on the same ones."""

    shared: bool
    engines: int
    trainers: int


def divisions(config: PPOConfig | RAFTConfig) -> list[Division]:
    """Returns divisions of the configuration's devices that its layouts allow; its own is one of them."""
    trainers = [device for name in config.groups for device in config.device_list(name)]
    engines, tp = parse_devices(config.rollout.devices), config.rollout.tp
    count = len({*trainers, *engines})
    replica = math.lcm(*(role.tp * role.pp for group in config.groups.values() for role in group.roles.values()))
    apart = [
        Division(shared=False, engines=number, trainers=count - number)
        for number in range(tp, count, tp)
        if (count - number) % replica == 0
    ]
    own = Division(shared=count < len(trainers) + len(engines), engines=len(engines), trainers=len(trainers))
    turns = Division(shared=True, engines=count // tp * tp, trainers=count)
    return sorted({*apart[:: max(1, math.ceil(len(apart) / _ROWS))], own, turns})


def estimate(config: PPOConfig | RAFTConfig, rates: Rates, division: Division, staleness: int) -> StepEstimate:
    """Returns the estimate of a run of the configuration with another division and staleness."""
    return SimulatedRun(
        rates,
        engines=division.engines // config.rollout.tp,
        trainers=division.trainers,
        samples=config.data.prompts_per_step * config.data.samples_per_prompt,
        staleness=staleness,
        mode=config.rollout.mode if staleness else "exact",
        shared=division.shared,
    ).estimate()


def print_divisions(config: PPOConfig | RAFTConfig, rates: Rates, console: Console | None = None) -> None:
    """Prints the rates, and a table of the estimates; devices that take turns have staleness 0 alone."""
    out = console or Console(highlight=False)
    token = f"at least {1e3 * rates.token:.3g} ms per token, " if rates.token else ""
    mean = sum(map(sum, rates.lengths)) / sum(map(len, rates.lengths))
    out.print(
        f"\nrates         engine {rates.engine:.4g} tokens/s, {token}trainer {rates.trainer:.4g} tokens/s per device, "
        f"sync {rates.sync:.3g} s, scores {rates.score:.3g} s, responses of {mean:.4g} tokens",
        soft_wrap=True,
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("engines", "trainers", *(f"staleness {staleness}" for staleness in _STALENESS)):
        table.add_column(heading, no_wrap=True)
    for division in divisions(config):
        staleness = _STALENESS[:1] if division.shared else _STALENESS
        cells = [_cell(estimate(config, rates, division, bound)) for bound in staleness]
        table.add_row(str(division.engines), "in turn" if division.shared else str(division.trainers), *cells)
    out.width = max(out.width, _WIDTH)  # a narrow output would lose digits
    out.print(table)
    out.print(_LEGEND, soft_wrap=True)


def _cell(estimate: StepEstimate) -> str:
    return f"{estimate.seconds:.4g} {estimate.engines_idle:3.0%} {estimate.trainers_idle:3.0%}"
