"""A user's module that fails at import."""

from __future__ import annotations

RATE = {}["no such rate"]
