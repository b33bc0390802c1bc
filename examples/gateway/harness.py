"""Asks the model a question, and rewards capitals in its answer. A run starts one harness per task."""

from __future__ import annotations

import json
import os

import httpx
from openai import OpenAI


def main() -> None:
    number = json.loads(os.environ["MEGARL_TASK"])["fields"]["number"]
    with OpenAI() as client:  # of OPENAI_BASE_URL and OPENAI_API_KEY
        answer = client.chat.completions.create(
            model=os.environ["MEGARL_MODEL"], messages=[{"role": "user", "content": f"item {number}"}]
        )
    text = answer.choices[0].message.content or ""
    reward = {"reward": sum(letter.isupper() for letter in text) / 4, "done": True}
    key = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    httpx.post(f"{os.environ['MEGARL_SESSION_URL']}/reward", headers=key, json=reward).raise_for_status()


if __name__ == "__main__":
    main()
