"""Engines: what turns a prompt into tokens. One protocol; adapters: vLLM, simulated, scripted."""
