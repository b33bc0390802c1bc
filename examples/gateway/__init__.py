"""A harness that talks to the model by OpenAI's client, see docs/gateway.md."""
