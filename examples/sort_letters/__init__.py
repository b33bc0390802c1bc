"""The demonstration: a small task with a checkable answer, learnt in three stages on any machine."""
