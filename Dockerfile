# MegaRL for GPUs, with Transformer Engine, as `make setup-gpu` installs it. From the repository:
#   docker build -t megarl .
#   docker run --gpus all --ipc host --ulimit memlock=-1 -it megarl megarl doctor
# The base has no CUDA: the locked wheels bring it, and libraries of an image would be loaded in their place. A C++ compiler
# and the headers of Python build Transformer Engine's part for torch; later Triton compiles its launchers with them.
FROM ubuntu:24.04@sha256:c4a8d5503dfb2a3eb8ab5f807da5bc69a85730fb49b5cfca2330194ebcc41c7b
# The tool python runs programs in bubblewrap.
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        bubblewrap ca-certificates g++ make python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
# What NVIDIA's container runtime gives the container.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility PIP_NO_CACHE_DIR=1
WORKDIR /megarl
COPY . .
RUN make setup-gpu
ENV PATH=/megarl/.venv-gpu/bin:${PATH}
