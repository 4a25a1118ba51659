"""A KV connector of vLLM's scheduler: prompts find tokens in a host memory that the test fills."""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)


class Nothing(KVConnectorMetadata):
    """What the scheduler tells workers here."""


class HostMemory(KVConnectorBase_V1):
    """Loads take until the test adds the request to `finished_recving_kv_req_ids`."""

    tokens: ClassVar[dict[str, int]] = {}

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        found = max(0, self.tokens.get(request.request_id, 0) - num_computed_tokens)
        return found, found > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return Nothing()

    # The rest belongs to workers.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, layer_name: str, *args: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...
