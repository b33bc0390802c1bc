"""How much `make unit` tries of what the suite tries."""

from hypothesis import settings

_UNIT = settings().max_examples < settings.get_profile("default").max_examples


def fewer(of_suite: int) -> int:
    """The number of examples or schedules: with the profile of `make unit` a tenth, but three at least."""
    return max(3, of_suite // 10) if _UNIT else of_suite
