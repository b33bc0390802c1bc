"""What a run tells of itself: metrics and where they go, and the time of its stages. Free of torch."""
