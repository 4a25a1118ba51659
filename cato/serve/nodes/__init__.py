"""Workflow nodes that are not LLM calls: retrieve, analyze, validate, transform.

Every node is a function `run(node, settings, names)`; `NodeRunner` picks the right one. Nothing
here imports Ray or FastAPI, and nothing here executes the code that it reads.
"""

from cato.serve.nodes.code_index import CodeIndex, Refresh, Snippet
from cato.serve.nodes.runner import NodeRunner

__all__ = ["CodeIndex", "NodeRunner", "Refresh", "Snippet"]
