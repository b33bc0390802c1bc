from megarl.rewards.functions import Completion


def reward(completion: Completion) -> float:
    """Returns the share of the response's characters that are the letter in the row's `answer`."""
    response = completion.response.strip()
    return response.count(completion.field("answer")) / max(1, len(response))
