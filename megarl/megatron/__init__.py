"""The Megatron engine: the only importer of ``megatron.core``.

It runs under one process per device and one ``torch.distributed`` world per group, with Ray,
torchrun or a plain process pool around it. The driver imports ``worker``, which imports
megatron-core at its first call.
"""

import logging
import os
import warnings

# Megatron warns at import that Transformer Engine and apex are absent, and torch that nvcc is here
# without a GPU; `megarl doctor` says it better.
warnings.filterwarnings("ignore", module=r"megatron\..*")
# It calls collectives by names that torch 2.13 has renamed (0.19).
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
logging.getLogger("megatron").setLevel(logging.ERROR)
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
# Otherwise Megatron reports the commit of a repository around it (package_info.py, 0.19).
os.environ["NO_VCS_VERSION"] = "1"
