"""TRL's losses and gradients, for tests/megatron/test_trl.py: DPOTrainer on one batch, and GKDTrainer's divergence.

Run as a program of its own, with TRL on its path: ``python -m tests.oracle.trl_losses DIRECTORY``. The directory has
``policy`` and ``reference``, ``pairs.jsonl`` with token ids, and ``losses.json``; ``name.json`` and
``name.safetensors`` are written for each loss, and ``divergences.safetensors`` of ``logits``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 100
END = VOCABULARY - 1


def text_of(ids: list[int]) -> str:
    """A text whose words are the ids, in the tokenizer below."""
    return "".join(f"w{token} " for token in ids if token != END)


def tokenizer() -> Any:
    """A tokenizer of one word per id, the last of which ends a response."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{token}": token for token in range(END)} | {"</s>": END}
    built = Tokenizer(models.WordLevel(words, unk_token="w0"))
    built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=built, eos_token="</s>", pad_token="</s>")


BETAS = {"forward": 0.0, "jsd": 0.3, "reverse": 1.0}


def logits() -> tuple[torch.Tensor, torch.Tensor]:
    """[1, 7, 11] of a student and of a teacher."""
    random = torch.Generator().manual_seed(5)
    student, teacher = (torch.randn(1, 7, 11, generator=random, dtype=torch.float64) for _ in range(2))
    return student, teacher


def write_divergences(directory: Path) -> None:
    """Sums over the tokens, and their gradients."""
    from safetensors.torch import save_file
    from trl.experimental.gkd import GKDTrainer  # pyright: ignore[reportMissingImports]

    found: dict[str, torch.Tensor] = {}
    for form, beta in BETAS.items():
        student, teacher = logits()
        student.requires_grad_()
        total = GKDTrainer.generalized_jsd_loss(student, teacher, beta=beta, reduction="sum")
        total.backward()
        found[form] = total.detach()
        found[f"{form} gradient"] = student.grad
    save_file(found, directory / "divergences.safetensors")


def main(directory: Path) -> None:
    from datasets import Dataset
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM
    from trl import DPOConfig, DPOTrainer  # pyright: ignore[reportMissingImports]

    rows = [json.loads(line) for line in (directory / "pairs.jsonl").read_text().splitlines()]
    texts = []
    for row in rows:
        texts.append({name: text_of(row[f"{name}_ids"]) for name in ("prompt", "chosen", "rejected")})
    for name, settings in json.loads((directory / "losses.json").read_text()).items():
        policy, reference = (
            AutoModelForCausalLM.from_pretrained(directory / model, dtype=torch.float32)
            for model in ("policy", "reference")
        )
        arguments = DPOConfig(
            output_dir=str(directory / "trl"),
            per_device_train_batch_size=len(rows),
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to="none",
            **settings,
        )
        trainer = DPOTrainer(
            policy, reference, args=arguments, train_dataset=Dataset.from_list(texts), processing_class=tokenizer()
        )
        batch = next(iter(trainer.get_train_dataloader()))
        ids = [[*row["prompt_ids"], *row[f"{side}_ids"]] for row in rows for side in ("chosen", "rejected")]
        seen = [
            row[mask.bool()].tolist() for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ]
        assert sorted(seen) == sorted(ids), "the tokenizer gives other ids"
        trainer.model.train()
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
        gradient = {key: value.grad for key, value in trainer.model.named_parameters()}
        save_file(gradient, directory / f"{name}.safetensors")
        (directory / f"{name}.json").write_text(json.dumps({"loss": loss.item()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    write_divergences(Path(sys.argv[1]))
