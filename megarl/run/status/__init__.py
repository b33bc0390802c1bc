"""How a run is doing, from its directory alone: free of torch, of Ray and of the configuration's schema."""
