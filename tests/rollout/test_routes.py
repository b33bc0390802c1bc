"""The experts that engines record, against transformers' routers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.models import model_spec
from megarl.rollout.routes import response_routes
from megarl.types import Layout, Prompt, RolloutChunk, SampleInfo, SampleRequest
from tests.megatron.compare import logprobs_by_chunk
from tests.megatron.tiny import load_role
from tests.pool import RankPool
from tests.rollout import in_process
from tests.rollout.conftest import ask, start
from tests.rollout.engine_process import EngineProcess
from tests.rollout.models import USED_VOCAB, family, random_model, save

pytestmark = [pytest.mark.e2e]


def routes_of(directory: Path, ids: list[int]) -> np.ndarray:
    """[positions, layers with experts, experts of a token], by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    found: list[torch.Tensor] = []
    for _, module in model.named_modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            module.register_forward_hook(lambda _module, _inputs, outputs: found.append(outputs[2]))
    with torch.no_grad():
        model(torch.tensor([ids]))
    return torch.stack(found, dim=1).numpy()


@pytest.mark.parametrize(("kind", "tp"), [("qwen2_moe", 1), ("qwen3_moe", 2), ("glm4_moe", 1), ("gpt_oss", 1)])
def test_recorded_experts_are_those_of_transformers(process: EngineProcess, tmp_path: Path, kind: str, tp: int) -> None:
    """Also those of prefixes that other responses computed."""
    directory = save(random_model(family(kind), 1), tmp_path / "model")
    start(process, directory, weights="files", tp=tp, records_routes=True)
    chunk: Any = ask(process).chunk
    assert chunk.routes is not None
    for row in range(len(chunk.sample_ids)):
        ids = [*chunk.prompt_ids[row].tolist(), *chunk.response_ids[row].tolist()]
        want = np.sort(routes_of(directory, ids)[:-1], axis=-1)
        got = np.sort(chunk.routes[row].reshape(want.shape), axis=-1)
        assert (got == want).all()


def trainer_logprobs(rank: int, directory: Path, chunk: RolloutChunk, infos: list[SampleInfo], replays: bool) -> Any:
    """By row, of a trainer in bfloat16."""
    from megarl.data.schedule import inference_schedule

    options: dict[str, Any] = {"vocab_size": USED_VOCAB, "replays_routes": replays, "trainable": False}
    role = load_role(directory, "actor", Layout(), rank, dtype=torch.bfloat16, **options)
    (passes,) = inference_schedule(infos, Layout(), 200).ranks
    return logprobs_by_chunk(role, passes, [chunk], 1.0)


def gaps(process: EngineProcess, pool: RankPool, directory: Path, *, records: bool) -> list[float]:
    """Root mean square distances of engine and trainer: by the trainer's own experts, and by the recorded ones."""
    start(process, directory, weights="files", records_routes=records, temperature=1.0, top_p=1.0, top_k=None)
    random = np.random.default_rng(0)
    asked: list[SampleRequest] = []
    for i in range(12):
        prompt = Prompt(prompt_id=f"p{i}", token_ids=tuple(random.integers(2, USED_VOCAB, 20).tolist()))
        asked.append(SampleRequest(sample_id=f"s{i}", prompt=prompt, seed=i))
    infos, (chunk,) = process.apply(in_process.generate, asked, [len(asked)])
    found: list[float] = []
    for replays in (False, True):
        (trainer,) = pool.run(trainer_logprobs, directory, chunk, infos, replays, world_size=1)
        distances: list[float] = []
        for row, engine in enumerate(chunk.rollout_logprobs):
            distances += np.abs(np.asarray(trainer[0][row]) - engine).tolist()
        found.append(float(np.sqrt(np.mean(np.square(distances)))))
    return found


def test_with_recorded_experts_a_mixture_is_as_near_as_a_dense_model(
    process: EngineProcess, pool: RankPool, tmp_path: Path
) -> None:
    """In bfloat16, where sums that round elsewhere choose other experts."""
    directories: list[Path] = []
    for kind in ("qwen3_moe", "qwen3"):
        config = family(kind, dtype="bfloat16", num_hidden_layers=8, num_experts=64)
        directories.append(save(random_model(config, 1), tmp_path / kind))
    mixture, dense = directories
    own, replayed = gaps(process, pool, mixture, records=True)
    expected, _ = gaps(process, pool, dense, records=False)
    print(f"own experts {own:.4f}, recorded {replayed:.4f}, dense {expected:.4f}")
    assert replayed < own / 2
    assert replayed < 1.5 * expected


def test_routes_of_many_experts_as_vllm_returns_them_have_two_bytes() -> None:
    """On a GPU it returns those of all layers, of which the second has no experts."""
    spec = model_spec(family("qwen3_moe", num_experts=300).to_dict())
    returned = np.arange(12, dtype=np.uint16).reshape(2, 3, 2) + 280
    completion = SimpleNamespace(token_ids=[3], routed_experts=returned)
    output: Any = SimpleNamespace(prompt_token_ids=[1, 2], outputs=[completion])
    row = response_routes(output, spec, None)
    assert (row.dtype, row.tolist()) == (np.uint16, [280, 281, 284, 285, 286, 287, 290, 291])
    completion.routed_experts = returned[:1]
    with pytest.raises(RuntimeError, match=r"1 positions of 3 tokens; set rollout\.router_replay to false"):
        response_routes(output, spec, None)
