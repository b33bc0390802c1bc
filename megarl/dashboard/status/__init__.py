"""The status of a run, from its directory alone; without torch, Ray and the configuration's schema."""
