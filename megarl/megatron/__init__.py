"""The Megatron engine: the only importer of ``megatron.core``.

It runs under one process per device and one ``torch.distributed`` world per group, with Ray, torchrun or a plain
process pool around it.
"""

import logging
import warnings

from megarl.megatron.platform.compiling import compiled_at_first_call

# Megatron warns at import that Transformer Engine and apex are absent, which `megarl doctor` says better; and it calls
# collectives by names that torch 2.13 has renamed (0.16).
warnings.filterwarnings("ignore", module=r"megatron\..*")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
logging.getLogger("megatron").setLevel(logging.ERROR)

with compiled_at_first_call():
    import megatron.core  # noqa: F401
