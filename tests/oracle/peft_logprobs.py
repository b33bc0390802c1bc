"""Log-probabilities of token ids by PEFT and transformers, and by a new vLLM engine that reads adapters.

The arguments are ``peft`` or ``vllm``, the directories of a model and of adapters, and a file of JSON lists
of ids; the log-probabilities of all ids but the first are printed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch


def by_peft(model: str, adapters: str, rows: list[list[int]]) -> list[list[float]]:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    adapted: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), adapters)
    found = []
    for ids in rows:
        with torch.no_grad():
            logits = adapted(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        found.append(logits.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist())
    return found


def by_vllm(model: str, adapters: str, rows: list[list[int]]) -> list[list[float]]:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    engine = LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        kv_cache_memory_bytes=1 << 26,
        enable_lora=True,
        max_lora_rank=8,
    )
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    prompts: Any = [{"prompt_token_ids": ids} for ids in rows]
    found = []
    for output in engine.generate(prompts, params, lora_request=LoRARequest("exported", 1, adapters)):
        told: Any = output.prompt_logprobs
        ids: Any = output.prompt_token_ids
        found.append([entry[token].logprob for entry, token in zip(told[1:], ids[1:], strict=True)])
    return found


if __name__ == "__main__":
    program, model, adapters, file = sys.argv[1:]
    of_rows = {"peft": by_peft, "vllm": by_vllm}[program]
    print("\n" + json.dumps(of_rows(model, adapters, json.loads(Path(file).read_text()))), flush=True)
    os._exit(0)  # vLLM's threads may abort the process at its end
