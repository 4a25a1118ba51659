"""Engines turn prompts into tokens. One protocol; adapters: vLLM, simulated, scripted."""
