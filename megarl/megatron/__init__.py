"""The Megatron engine: the only importer of ``megatron.core``.

It runs under one process per device and one ``torch.distributed`` world per group, with Ray,
torchrun or a plain process pool around it. The driver imports ``worker``, which imports
megatron-core at its first call: ``platform.start_platform`` comes before the first import of
megatron.core in a process.
"""
