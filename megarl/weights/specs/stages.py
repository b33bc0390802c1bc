"""Which layers a pipeline stage holds."""

from __future__ import annotations

from megarl.types import Layout


def chunk_layers(layers: int, layout: Layout, stage: int, chunk: int) -> range:
    """The layers of a model chunk.

    Chunks follow one another: all first chunks of the stages in order, then all second ones. Their sizes differ by at
    most one, and so do the stages'. The last stage has the shorter chunks first, for it has the output layer too, then
    the first stage, which has the embedding.

    Args:
        layers: of the model; at least as many as there are chunks.
        stage: the pipeline rank.
        chunk: of the virtual stages of that rank.
    """
    pp, vpp = layout.pp, layout.vpp
    full, short = -(-layers // (pp * vpp)), -layers % (pp * vpp)
    stages = [pp - 1, *range(pp - 1)]
    turns = [(stage, vpp - 1 - turn if stage == pp - 1 else turn) for turn in range(vpp) for stage in stages]
    shorter = {at * pp + stage for stage, at in turns[:short]}
    index = chunk * pp + stage
    start = full * index - sum(1 for other in shorter if other < index)
    return range(start, start + full - (index in shorter))
