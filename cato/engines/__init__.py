"""Inference engines behind one protocol: vLLM, simulated and scripted."""
