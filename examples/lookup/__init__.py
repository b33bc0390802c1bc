"""A task of several turns that needs a tool: docs/environments.md."""
