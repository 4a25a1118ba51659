"""Extension of vLLM's worker: replace the weights with those of another checkpoint.

Runs inside the engine, whose interpreter therefore needs CATO.
"""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any


class SwapExtension:
    """Mixed into vLLM's worker (`--worker-extension-cls`); called by `/collective_rpc`."""

    def cato_swap(self, path: str) -> float:
        """Load the weights in the folder `path`, of the same architecture; return the seconds.

        On a CPU, linear layers keep a packed copy of their weights. Reloading renews all copies but
        that of an output layer tied to the embedding (vLLM 0.32): it is packed again here.
        """
        started_s = time.perf_counter()
        worker: Any = self
        worker.reload_weights(weights_path=path)
        if worker.device.type == "cpu":
            head = getattr(worker.model_runner.get_model(), "lm_head", None)
            weight = getattr(head, "weight", None)
            if weight is not None and weight.ndim == 2:
                utils: Any = import_module("vllm.model_executor.layers.utils")
                utils.dispatch_cpu_unquantized_gemm(head, remove_weight=False)
        return time.perf_counter() - started_s
