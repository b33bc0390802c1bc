"""Runs that follow each other as one experiment: SFT, a reward model, PPO."""

from __future__ import annotations

from launchers.submission import make_app

app = make_app(
    "Run each CONFIG after the one before, as one experiment of NeMo-Run: SFT, a reward model, PPO.\n\n"
    "A later configuration may name what an earlier one will export, such as runs/sft/export. It is "
    "checked as far as possible now, and completely when it starts. Runs after a failed one do not start.",
    chain=True,
)

if __name__ == "__main__":
    app()
