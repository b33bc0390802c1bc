"""The former name of `megarl.garbage_collection`, until `cluster/ray_worker.py` imports that."""

from megarl.garbage_collection import importing as importing
