"""Launchers: how runs get onto clusters, and what runs on every node of a job."""
