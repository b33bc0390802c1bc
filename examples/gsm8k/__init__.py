"""GRPO on the word problems of GSM8K."""
