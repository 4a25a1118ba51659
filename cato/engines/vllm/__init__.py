"""The vLLM adapter: `process` talks to a server, `zygote` (run in vLLM's interpreter) starts it.

Nothing is imported here: `zygote` must load without the rest of CATO.
"""
