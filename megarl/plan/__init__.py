"""What would happen, before anything runs: a run from its configuration, and a transfer of weights from its layouts."""

from megarl.plan.run import print_plan

__all__ = ["print_plan"]
