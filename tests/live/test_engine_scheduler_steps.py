"""vLLM's own schedulers with the rule in them, stepped without a model: a CPU's, and that of cards,
which plans a step before it knows the outcome of the one before."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest

from cato.config.places import DEMO_SOURCE, model_path
from cato.core.pool.prefill import LEAST_TOKENS, CallTarget, DueDateRule
from cato.engines.vllm.scheduler import due_date_scheduler, xargs_of

pytestmark = [pytest.mark.live, pytest.mark.vllm, pytest.mark.timeout(300)]

BLOCK_TOKENS = 16


@pytest.fixture(scope="module")
def vllm() -> Any:
    from cato.engines.vllm.zygote import hide_cuda_media_packages

    pytest.importorskip("vllm")
    hide_cuda_media_packages()
    import vllm

    return vllm


class Steps:
    """A scheduler, and steps of which `in_flight` are under way at a time.

    `in_host`: prompt tokens of requests, by id, that are loaded from host memory.
    """

    def __init__(
        self,
        *,
        in_flight: int,
        blocks: int,
        most: int = 8,
        in_host: dict[str, int] | None = None,
        **more: Any,
    ) -> None:
        import torch
        from vllm.config import (
            CacheConfig,
            DeviceConfig,
            KVTransferConfig,
            ModelConfig,
            SchedulerConfig,
            VllmConfig,
        )
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
        )
        from vllm.v1.structured_output import StructuredOutputManager

        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        model = ModelConfig(model=model_path(DEMO_SOURCE), dtype="float32", max_model_len=1024)
        connector = None
        if in_host:
            from kits.kv_connector import HostMemory

            HostMemory.tokens = in_host
            connector = KVTransferConfig(
                kv_connector="HostMemory",
                kv_role="kv_both",
                kv_connector_module_path="kits.kv_connector",
            )
        config = VllmConfig(
            kv_transfer_config=connector,
            model_config=model,
            scheduler_config=SchedulerConfig(
                max_num_seqs=most,
                max_num_batched_tokens=512,
                max_model_len=1024,
                is_encoder_decoder=False,
                **more,
            ),
            cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True),
            device_config=DeviceConfig("cpu"),
        )
        config.scheduler_config.async_scheduling = in_flight > 1
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        self.scheduler = due_date_scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            log_stats=True,
            block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
        )
        self.in_flight = in_flight
        self.under_way: deque[Any] = deque()
        self.said: dict[str, int] = {}
        self.order: list[str] = []

    def add(self, id: str, ids: list[int], output: int, target: CallTarget) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(
            max_tokens=output, ignore_eos=True, extra_args=xargs_of(target), temperature=0.0
        )
        request = Request(id, ids, params, None, block_hasher=self.hasher)
        self.scheduler.add_request(request)
        self.said[id] = 0

    def step(self) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        output = self.scheduler.schedule()
        self.under_way.append(output)
        if len(self.under_way) < self.in_flight:
            return
        done = self.under_way.popleft()
        ids = list(done.num_scheduled_tokens)
        emits = [[7] if self._ends(id, done) else [] for id in ids]
        outputs = self.scheduler.update_from_output(
            done,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={id: i for i, id in enumerate(ids)},
                sampled_token_ids=emits,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )
        for client in outputs.values():
            for one in client.outputs:
                if one.new_token_ids and not self.said[one.request_id]:
                    self.order.append(one.request_id)
                self.said[one.request_id] += len(one.new_token_ids)

    def load(self, id: str) -> None:
        """Its blocks have arrived."""
        self.scheduler.finished_recving_kv_req_ids.add(id)

    def _ends(self, id: str, output: Any) -> bool:
        """Whether the step gives it a token: its prompt is whole with it."""
        before = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        before |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        request = self.scheduler.requests.get(id)
        if request is None:
            return False
        return before[id] + output.num_scheduled_tokens[id] >= request.num_prompt_tokens

    def run(self, most: int = 5000) -> None:
        for _ in range(most):
            if not self.scheduler.has_requests() and not any(
                o.total_num_scheduled_tokens for o in self.under_way
            ):
                return
            self.step()
        raise AssertionError("it does not end")


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("blocks", [400, 90])
def test_every_request_gets_its_tokens_and_every_block_comes_back(
    vllm: Any, in_flight: int, blocks: int, policy: str
) -> None:
    draw = random.Random(blocks + in_flight)
    steps = Steps(in_flight=in_flight, blocks=blocks, policy=policy)
    assert type(steps.scheduler).__name__ == "DueDateScheduler"
    free = steps.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    wanted, gone = {}, set()
    shared = [draw.randrange(3000) for _ in range(200)]
    for i in range(60):
        ids = [draw.randrange(3000) for _ in range(draw.randrange(1, 700))]
        output = draw.randrange(1, 40)
        target = CallTarget(draw.choice([0.01, 0.5, 20.0]), tpot_s=draw.choice([0.05, 1.0]))
        steps.add(f"r{i}", (shared if i % 2 else []) + ids, output, target)
        wanted[f"r{i}"] = output
        for _ in range(draw.randrange(4)):
            steps.step()
        if i % 7 == 6:
            from vllm.v1.request import RequestStatus

            id = draw.choice(list(wanted))
            if id in steps.scheduler.requests:
                steps.scheduler.finish_requests(id, RequestStatus.FINISHED_ABORTED)
                gone.add(id)
    steps.run()
    assert {id: n for id, n in steps.said.items() if id not in gone} == {
        id: n for id, n in wanted.items() if id not in gone
    }
    assert steps.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
    assert not steps.scheduler._known


@pytest.mark.parametrize("in_flight", [1, 2])
def test_prompts_begin_in_the_order_in_which_they_are_due(vllm: Any, in_flight: int) -> None:
    steps = Steps(in_flight=in_flight, blocks=400, most=4)
    for i, target_s in enumerate((30.0, 9.0, 20.0, 5.0, 15.0, 2.0)):
        steps.add(f"{target_s:g}", [i] * 900, 4, CallTarget(target_s))
    steps.run()
    assert steps.order == ["2", "5", "9", "15", "20", "30"]


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_prompt_that_is_due_sooner_pauses_one_that_runs(vllm: Any, in_flight: int) -> None:
    steps = Steps(in_flight=in_flight, blocks=400)
    steps.scheduler._rule = DueDateRule(most_s=1e-9)  # the least piece of one prompt in a step
    steps.add("stream", [1] * 10, 200, CallTarget(0.1))
    while steps.said["stream"] < 3:
        steps.step()
    steps.add("long", [2] * 600, 2, CallTarget(60.0))
    for _ in range(5):
        steps.step()
    steps.add("short", [3] * 64, 2, CallTarget(1.0))
    for _ in range(4):
        steps.step()
        assert steps.scheduler._pieces == {"short": LEAST_TOKENS}
        assert steps.scheduler.requests["long"].num_computed_tokens == 5 * LEAST_TOKENS
    assert steps.scheduler.requests["short"].num_computed_tokens >= 4 * LEAST_TOKENS
    steps.run()
    assert steps.order == ["stream", "short", "long"]


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_loaded_prompt_and_a_long_one_that_is_due_sooner_both_end(
    vllm: Any, in_flight: int
) -> None:
    steps = Steps(in_flight=in_flight, blocks=400, in_host={"loaded": 160})
    steps.add("loaded", list(range(1000, 1200)), 4, CallTarget(60.0))
    steps.step()
    assert steps.scheduler.requests["loaded"].num_computed_tokens == 160
    steps.add("long", list(range(900)), 4, CallTarget(1.0))
    steps.load("loaded")
    steps.run(most=50)
    assert steps.said == {"loaded": 4, "long": 4}


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_loaded_prompt_that_waits_for_a_batch_slot_does_not_stop_those_that_have_one(
    vllm: Any, in_flight: int
) -> None:
    steps = Steps(in_flight=in_flight, blocks=400, most=2, in_host={"loaded": 160})
    steps.scheduler._rule = DueDateRule(most_s=1e-9)  # the least piece of one prompt in a step
    steps.add("loaded", list(range(1000, 1900)), 4, CallTarget(1.0))
    steps.step()
    for i in range(2):
        steps.add(f"long-{i}", [i] * 900, 4, CallTarget(60.0 - 30.0 * i))
        steps.step()
    assert len(steps.scheduler.running) == 2
    steps.load("loaded")
    steps.run(most=400)
    assert steps.said == {"loaded": 4, "long-0": 4, "long-1": 4}


def test_a_load_that_has_no_room_beside_another_does_not_stop_a_running_prompt(vllm: Any) -> None:
    steps = Steps(in_flight=1, blocks=120, in_host={"loading": 160, "next": 640})
    steps.scheduler._rule = DueDateRule(most_s=1e-9)  # the least piece of one prompt in a step
    steps.add("runs", [1] * 400, 4, CallTarget(60.0))
    steps.step()
    steps.add("loading", list(range(1000, 1900)), 4, CallTarget(20.0))
    steps.step()
    steps.add("next", list(range(2000, 2700)), 4, CallTarget(1.0))
    runs = steps.scheduler.requests["runs"]
    for _ in range(3):
        before = runs.num_computed_tokens
        steps.step()
        assert runs.num_computed_tokens > before
    assert steps.scheduler.requests["next"].num_computed_tokens == 0


class Compiled:
    """A structured output whose grammar is ready after it was looked at `looks` times."""

    def __init__(self, looks: int) -> None:
        self._looks = looks

    @property
    def grammar(self) -> object | None:
        self._looks -= 1
        return object() if self._looks < 0 else None


@pytest.mark.parametrize("looks", [0, 1])
def test_grammars_that_become_ready_do_not_cost_a_step(vllm: Any, looks: int) -> None:
    """At once, or after the step was planned."""
    from vllm.v1.request import RequestStatus

    steps = Steps(in_flight=1, blocks=400, most=16)
    for i in range(6):
        steps.add(f"grammar-{i}", [i] * 50, 2, CallTarget(30.0))
        request = steps.scheduler.requests[f"grammar-{i}"]
        request.structured_output_request = Compiled(looks)
        request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    steps.add("urgent", [99] * 50, 2, CallTarget(0.1))
    scheduled = list(steps.scheduler.schedule().num_scheduled_tokens)
    assert scheduled[0] == "urgent"
    assert len(scheduled) > 1 or looks
