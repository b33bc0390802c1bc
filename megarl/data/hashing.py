"""Hashes that are the same in every process and every run, unlike the built-in ``hash``."""

from __future__ import annotations

import hashlib


def stable_hash(*parts: int | str) -> int:
    """A non-negative 63-bit number that depends on nothing but the parts and their order."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        encoded = repr(part).encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return int.from_bytes(digest.digest(), "little") >> 1
