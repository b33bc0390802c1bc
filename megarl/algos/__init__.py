"""The algorithms as pure functions of tensors: no configuration, no collectives, no logging.

Token arguments are response-aligned: [B, R], column t is response token t, and a bool
``response_mask`` says which count. B rows (samples), R columns (the longest response). Functions
without a mask are elementwise and take any shape. float32 and float64 work.
"""
