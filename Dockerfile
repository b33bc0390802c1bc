# MegaRL for GPUs, with Transformer Engine. From the repository:
#   docker build -t megarl .
#   docker run --gpus all --ipc host --ulimit memlock=-1 -it megarl megarl doctor
# The base image is for its CUDA compiler, with which Transformer Engine's part for torch is built: CUDA 13, as the torch of
# requirements/cuda.txt. Its own torch is not used, as vLLM needs the locked one.
ARG BASE=nvcr.io/nvidia/pytorch:25.10-py3
FROM ${BASE}
COPY --from=ghcr.io/astral-sh/uv:0.8.22 /uv /usr/local/bin/
WORKDIR /megarl
ENV UV_PYTHON_INSTALL_DIR=/opt/python PIP_CONSTRAINT=
# The tool python runs programs in bubblewrap.
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap && rm -rf /var/lib/apt/lists/*
RUN uv python install --no-bin 3.12
COPY . .
RUN make setup-gpu PYTHON="$(uv python find --managed-python 3.12)"
RUN NVTE_FRAMEWORK=pytorch .venv-gpu/bin/python -m pip install --no-build-isolation "transformer-engine[pytorch]>=2.8"
ENV PATH=/megarl/.venv-gpu/bin:${PATH}
