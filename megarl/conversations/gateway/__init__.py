"""The gateway: programs that speak OpenAI's or Anthropic's protocol hold the conversations of a run."""
