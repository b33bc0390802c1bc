"""The Megatron engine: the only importer of ``megatron.core``.

It runs under one process per device and one ``torch.distributed`` world per group, with Ray, torchrun or a plain
process pool around it.
"""
