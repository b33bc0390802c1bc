"""A module of a user that fails when it is imported."""

from __future__ import annotations

RATE = {}["no such rate"]
