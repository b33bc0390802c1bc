"""``megarl check-model``: compares what is computed for a model with transformers and vLLM."""
