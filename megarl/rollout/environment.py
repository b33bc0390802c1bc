"""The environment variables that vLLM and torch read when they are imported."""

from __future__ import annotations

import os
import warnings

_ALWAYS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler runs in the engine's process
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # scoring asks for one position more than the model may have
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
_QUIET = {  # unless the person who looks for something has set them
    "VLLM_LOGGING_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore::FutureWarning:vllm.triton_utils.dispatcher",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_LOGS": "-torch._library.triton",
}
_CPU = {
    "TORCH_COMPILE_DISABLE": "1",  # the sampler would compile for seconds at the first generation
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engines and trainers share the cores
    "OMP_NUM_THREADS": "1",
}
_REMOVED = ("VLLM_CPU_KVCACHE_SPACE",)  # would override the configured KV cache


def vllm_environment(device: str) -> dict[str, str]:
    """What must be set in the environment of a process before it imports torch or vLLM.

    Args:
        device: ``cuda`` or ``cpu``.
    """
    quiet = {name: os.environ.get(name, value) for name, value in _QUIET.items()}
    return _ALWAYS | quiet | (_CPU if device == "cpu" else {})


def set_vllm_environment(device: str) -> None:
    """Sets it for this process and those that it starts, and removes what would contradict the config."""
    os.environ.update(vllm_environment(device))
    for name in _REMOVED:
        os.environ.pop(name, None)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.triton_utils")
