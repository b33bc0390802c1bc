"""The reward of GSM8K (Cobbe et al., 2021), whose column `answer` is a worked solution that ends with `#### 72`."""

from megarl.rewards.functions import Completion


def correct(completion: Completion, *, field: str = "answer") -> float:
    """1 if the last answer of the response is mathematically equal to that of the solution, else 0.

    Raises:
        ValueError: the solution has no `####`.
    """
    from math_verify import parse, verify

    solution = str(completion.field(field))
    _, mark, number = solution.rpartition("####")
    if not mark:
        raise ValueError(f"the field {field!r} has no answer after '####': {solution[-80:]!r}")
    wanted = parse(number.strip().replace(",", ""))
    return float(verify(wanted, parse(completion.response)))
