"""Engines: what turns a prompt into tokens. One protocol, two adapters (vLLM, simulated)."""
