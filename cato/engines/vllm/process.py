"""vLLM's stock OpenAI server in its own process, reached over a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path

import aiohttp

from cato.core.errors import EngineDeadError, EngineError, InputError
from cato.core.hung import HungRule
from cato.core.kv_events import BlocksCleared, KvEvent
from cato.core.topology import EngineSpec, ModelSpec
from cato.engines.base import EngineChunk, EngineFacts, EngineLoad, EngineRequest, EngineState
from cato.engines.vllm import dialects, stream, zygote
from cato.engines.vllm.adapters import ADAPTER_ENV, AddedAdapters
from cato.engines.vllm.arguments import server_argv
from cato.engines.vllm.checkpoints import why_not_swappable
from cato.engines.vllm.host import Zygote, check_socket_path
from cato.engines.vllm.kv_feed import CALL_HEADER, KvFeed, has_events, without_repeats
from cato.engines.vllm.logs import EngineLog
from cato.engines.vllm.offloading import Offloading, offloading_of
from cato.engines.vllm.scheduler import STEP_VARIABLE, with_target
from cato.engines.vllm.silence import SilenceWatch
from cato.engines.vllm.template_probe import ask_template
from cato.wire.limits import limits_of, shortened

log = logging.getLogger("cato.engines")

# Enables the worker extension and sleep. The socket is open to this user only, and CATO passes no
# client request to these paths.
_DEV_ENV = {"VLLM_SERVER_DEV_MODE": "1"}
_ORDER_TIMEOUT = aiohttp.ClientTimeout(total=300.0)
# vLLM's level 1: offload weights to host memory, drop the KV cache.
_SLEEP_LEVEL = 1

_HEALTH_POLL_S = 0.05
_STOP_TIMEOUT_S = zygote.KILL_AFTER_S + 2.0
_ZYGOTE_REPLY_TIMEOUT_S = 30.0
_CONTROL_TIMEOUT = aiohttp.ClientTimeout(total=10.0)
# A generation may take any time; if the engine dies, its connections close.
_GENERATE_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
# Shorter than the server's (ENGINE_ENV), so that a request never meets a closing connection.
_KEEP_ALIVE_S = 30.0
_NOT_LISTENING = (ConnectionRefusedError, FileNotFoundError)


def _counted_in(chunk: EngineChunk, more: int) -> EngineChunk:
    """`chunk` with `more` tokens, which the engine saw as prompt, counted as output."""
    if not more:
        return chunk
    is_told = chunk.prompt_tokens >= 0
    return replace(
        chunk,
        output_tokens=chunk.output_tokens + more,
        prompt_tokens=max(0, chunk.prompt_tokens - more) if is_told else -1,
    )


def _ask_for_usage(body: dict[str, object], request: EngineRequest) -> bool:
    """Set `stream_options` of `body`; return whether each chunk will have its usage."""
    asked = body.pop("stream_options", None)
    if not (request.stream and request.endpoint.has_choices):
        return False
    options = dict(asked) if isinstance(asked, dict) else {}
    options["include_usage"] = True
    if not request.raw:
        options["continuous_usage_stats"] = True
    body["stream_options"] = options
    return bool(options.get("continuous_usage_stats"))


class VllmEngine:
    """A vLLM server process: started, watched, called and stopped by this object.

    With `zygote_socket` the server is forked from that zygote; otherwise a private zygote without
    preload starts it. Either way the server ends when this process ends.
    `start` may be called again after a death or a stop.
    """

    def __init__(
        self,
        spec: EngineSpec,
        model: ModelSpec,
        model_path: str,
        socket_dir: str,
        zygote_socket: str | None = None,
        *,
        accelerator: str = "cpu",
        cards: int = 0,
        log: str | None = None,
        hung: HungRule = HungRule(),  # noqa: B008  # frozen
    ) -> None:
        self._spec = spec
        self._model = model
        self._model_path = model_path
        # The name given at start; the server keeps it when other weights are swapped in.
        self._server_model = model.name
        self._socket_dir = socket_dir
        self._zygote_socket = zygote_socket
        self._accelerator = accelerator
        self._cards = cards
        self._offloading = Offloading()
        # One socket name per engine and start; the log is kept across starts.
        self._name = f"vllm-{os.getpid()}-{secrets.token_hex(3)}"
        self._starts = 0
        self._log = EngineLog(socket_dir, self._name, log)
        self._uds = ""
        self._state = EngineState.STOPPED
        self._facts = EngineFacts("vllm", model.name, spec.max_num_seqs, 0, simulated=False)
        self._death: asyncio.Future[str] | None = None
        self._lock = asyncio.Lock()
        links = Path(socket_dir, f"{self._name}.lora")
        self._adapters = AddedAdapters(self._post_adapter, links)
        self._own_zygote: Zygote | None = None
        self._owner: asyncio.StreamWriter | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._session: aiohttp.ClientSession | None = None
        # Answers being read.
        self._answers: set[aiohttp.ClientResponse] = set()
        self._silence = SilenceWatch(hung, spec, self._ask)
        self._listener: asyncio.Task[None] | None = None
        self._why_given_up = ""
        # The server's KV events.
        self._heard: Callable[[KvEvent], None] | None = None
        self._feed: KvFeed | None = None
        self._feeding: asyncio.Task[None] | None = None
        self.pid: int | None = None

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def model(self) -> ModelSpec:
        """The model that the engine holds now."""
        return self._model

    @property
    def socket(self) -> str:
        """Path of the Unix socket that the server answers on."""
        return self._uds

    @property
    def log(self) -> str:
        """Path of the server's log."""
        return self._log.path

    @property
    def facts(self) -> EngineFacts:
        """Context and version are known once the engine is ready."""
        return self._facts

    async def start(self) -> None:
        async with self._lock:
            if self._state is EngineState.READY:
                return
            self._log.has_failed |= self._state is EngineState.DEAD
            await self._end()
            self._state = EngineState.STARTING
            self._death = asyncio.get_running_loop().create_future()
            self._why_given_up = ""
            started_s = time.monotonic()
            try:
                async with asyncio.timeout(self._spec.start_timeout_s):
                    await self._launch()
                    await self._wait_healthy()
                    self._facts = await self._ask_facts(time.monotonic() - started_s)
                if self._was_stopped() or self._death.done():  # since its last answer
                    raise EngineError(self._why_not_started(), 503)
            except BaseException as exc:
                if not self._was_stopped():
                    self._state = EngineState.DEAD
                await self._end()
                if isinstance(exc, TimeoutError):
                    raise EngineError(
                        f"vLLM did not answer within {self._spec.start_timeout_s:g} s; "
                        + self._log.last_words()
                    ) from exc
                raise
            self._state = EngineState.READY
            self._silence.is_heard_again()
            spec = self._spec.on(self._accelerator)
            log.info(
                "%s: steps of %d tokens, at most %d of one prompt beside other calls",
                self._model.name,
                spec.max_num_batched_tokens,
                spec.long_prefill_token_threshold or spec.max_num_batched_tokens,
            )
            if spec.host_memory:
                log.info("%s: %s", self._model.name, self._offloading.words)
            if spec.scheduler and self._accelerator == "npu":
                log.warning("%s: vllm-ascend schedules, not %s", self._model.name, spec.scheduler)
            self._listener = asyncio.create_task(self._listen())

    async def stop(self) -> None:
        self._log.has_failed |= self._state is EngineState.DEAD
        self._state = EngineState.STOPPED  # set first: exits from here on are intended
        async with self._lock:
            self._state = EngineState.STOPPED
            await self._end()
            self._log.delete_unless_failed()

    async def wait_dead(self) -> str:
        if self._death is None:
            raise EngineError("the engine was never started")
        return await asyncio.shield(self._death)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk, None]:
        session = self._ready_session()
        body = without_repeats(request.body)
        body["model"] = self._server_model
        if request.adapter is not None:
            most = self._model.adapter_places if self._accelerator == "cpu" else None
            await self._adapters.hold(request.adapter, most)
            body["model"] = request.adapter.name
        if request.endpoint.generates:
            body["stream"] = request.stream
            if self._spec.priority_scheduling:
                body["priority"] = request.priority
            if self._spec.scheduler:
                body = with_target(body, request.target)
        continuous_usage = _ask_for_usage(body, request)
        headers = {"Content-Type": "application/json", "X-Request-Id": request.id}
        if self._feed is not None:
            headers[CALL_HEADER] = request.id
            body.pop("session_id", None)  # vLLM would prefer it; it has no other use
        if request.traceparent:  # vLLM's own span, if its trace exporter is set
            headers["traceparent"] = request.traceparent
        response: aiohttp.ClientResponse | None = None
        call = self._silence.begin(request.prompt_tokens)
        try:
            more = await self._uncounted(request)
            if more:
                left = min(limits_of(body).values(), default=more + 1)
                if left <= more:
                    prompt_tokens = request.prompt_tokens + request.begun_tokens
                    yield EngineChunk("", left, prompt_tokens, 0, "length")
                    return
                body = shortened(body, more)
            response = await session.post(
                f"http://engine{request.endpoint.path}",
                data=json.dumps(body).encode(),
                headers=headers,
                timeout=_GENERATE_TIMEOUT,
            )
            self._answers.add(response)
            if session.closed:  # ended between the answer's head and this line
                raise EngineDeadError("the engine has ended", 503)
            if response.status != 200:
                self._log.has_failed |= response.status >= 500
                refusal, context = await response.read(), self._facts.context_tokens or None
                raise stream.http_error(response.status, refusal, context)
            if not request.stream:
                answer = dialects.answer_of(request.endpoint, await response.read())
                self._silence.show_life()
                yield self._renamed(answer)
                return
            events = dialects.events_of(
                request.endpoint, raw=request.raw, continuous_usage=continuous_usage
            )
            async for data in response.content.iter_any():
                self._silence.heard(call)
                for chunk in events.feed(data):
                    yield _counted_in(self._renamed(chunk), more)
            if not events.is_finished:
                raise EngineDeadError("the engine's answer ended early", 503)
        except (aiohttp.ClientError, OSError) as exc:
            self._log.has_failed |= not self._was_stopped()
            raise self._lost(exc) from exc
        except EngineDeadError as error:
            if stream.says_core_is_dead(error):
                self._give_up("lost its engine core")
            raise
        except RuntimeError as exc:
            if session.closed:  # stopped or died meanwhile
                raise EngineDeadError("the engine has ended", 503) from exc
            raise
        finally:
            self._silence.end(call)
            if response is not None:
                self._answers.discard(response)
                response.close()  # aborts the request unless fully read

    def watch_cache(self, heard: Callable[[KvEvent], None]) -> None:
        self._heard = heard

    def _tell(self, event: KvEvent) -> None:
        if self._heard is not None:
            self._heard(event)

    async def load(self) -> EngineLoad:
        return stream.load_of_metrics(await self._ask("GET", "/metrics"))

    async def count_tokens(self, text: str, *, has_special: bool = True) -> int:
        """Exact count by the engine's tokenizer, with or without a prompt's special tokens."""
        asked = {"model": self._server_model, "prompt": text, "add_special_tokens": has_special}
        body = json.dumps(asked).encode()
        return int(json.loads(await self._ask("POST", "/tokenize", body))["count"])

    async def _uncounted(self, request: EngineRequest) -> int:
        """Tokens of the answer so far that other engines generated and that were not counted."""
        if not request.begun:
            return 0
        try:
            tokens = await self.count_tokens(request.begun, has_special=False)
        except EngineDeadError:
            raise
        except EngineError as error:
            log.warning("%s: cannot count the tokens generated so far: %s", request.id, error)
            return 0
        return max(0, tokens - request.begun_tokens)

    async def swap(self, model: ModelSpec, model_path: str) -> float:
        """Replace the weights with those of `model`; return the seconds it took.

        No call may run. Raise `InputError` when the two models differ in more than their weights,
        and `EngineError` when it fails: the engine is then unusable.
        """
        why_not = why_not_swappable(self._model_path, model_path)
        if why_not is not None:
            raise InputError(f"{model.name} cannot take the place of {self._model.name}: {why_not}")
        body = json.dumps({"method": "cato_swap", "args": [model_path]}).encode()
        self._silence.may_be_silent = True
        limit = aiohttp.ClientTimeout(total=self._spec.start_timeout_s)  # it reads them from disk
        answer = json.loads(await self._ask("POST", "/collective_rpc", body, limit))
        if not json.loads(await self._ask("POST", "/reset_prefix_cache"))["success"]:
            raise EngineError(f"{model.name}: the engine keeps KV of the old weights", 503)
        self._silence.is_heard_again()
        self._model, self._model_path = model, model_path
        self._facts = replace(self._facts, served_model=model.name)
        return float(answer["results"][0])

    async def sleep(self) -> None:
        """Free the accelerator's memory, except the process's own; no call may run.

        Raise `EngineError` when it fails: the engine is then unusable. On a CPU vLLM only pauses.
        """
        self._silence.may_be_silent = True
        await self._ask("POST", f"/sleep?level={_SLEEP_LEVEL}", None, _ORDER_TIMEOUT)

    async def wake(self) -> None:
        """End the sleep; `facts.start_s` is its duration. Raise `EngineError` when it fails."""
        started_s = time.monotonic()
        await self._ask("POST", "/wake_up", None, _ORDER_TIMEOUT)
        if json.loads(await self._ask("GET", "/is_sleeping"))["is_sleeping"]:
            raise EngineError("the engine did not wake up", 503)
        self._silence.is_heard_again()
        self._facts = replace(self._facts, start_s=time.monotonic() - started_s)

    async def _post_adapter(self, path: str, body: bytes | None) -> bytes:
        """The engine's own loop loads an adapter, and downloads it first."""
        self._silence.may_be_silent = True
        try:
            return await self._ask("POST", path, body, _ORDER_TIMEOUT)
        finally:
            self._silence.is_heard_again()

    def _renamed(self, chunk: EngineChunk) -> EngineChunk:
        """Replace the model name that the engine was started with."""
        if not chunk.raw or self._server_model == self._model.name:
            return chunk
        # In JSON text every quotation mark is escaped, so this can only be a key of the answer.
        old, new = (f'"model":{json.dumps(m)}' for m in (self._server_model, self._model.name))
        return replace(chunk, raw=chunk.raw.replace(old.encode(), new.encode()))

    async def _launch(self) -> None:
        spec = self._spec
        self._starts += 1
        Path(self._socket_dir).mkdir(parents=True, exist_ok=True)
        self._uds = os.path.join(self._socket_dir, f"{self._name}-{self._starts}.sock")
        check_socket_path(self._uds)
        self._log.open()
        zygote_socket = self._zygote_socket
        if zygote_socket is None:
            own = self._own_zygote = Zygote(
                f"{self._uds}.z",
                python=spec.python,
                accelerator=self._accelerator,
                preload=False,
                env=spec.env,  # read by the loader and the interpreter at start only
                log=self.log,
            )
            await own.ready(spec.start_timeout_s)
            zygote_socket = own.socket
        self._offloading = offloading_of(spec, self._accelerator, self._cards, self._model_path)
        argv = server_argv(
            spec,
            self._model,
            self._model_path,
            self._uds,
            accelerator=self._accelerator,
            cards=self._cards,
            offloading=self._offloading,
        )
        self._server_model = self._model.name
        env = {
            **(_DEV_ENV if spec.swap or spec.sleep else {}),
            **(ADAPTER_ENV if self._model.adapter_places else {}),
            **({STEP_VARIABLE: f"{spec.prefill_step_s:g}"} if spec.scheduler else {}),
            **spec.env,
        }
        request = {"argv": argv, "env": env, "log": self.log}
        try:
            reader, self._owner = await asyncio.open_unix_connection(zygote_socket)
            self._owner.write(json.dumps(request).encode() + b"\n")
            async with asyncio.timeout(_ZYGOTE_REPLY_TIMEOUT_S):
                reply = json.loads(await reader.readline())
        except (OSError, ValueError, TimeoutError) as exc:
            raise EngineError(f"no engine from the zygote at {zygote_socket}: {exc!r}") from exc
        if "pid" not in reply:
            raise EngineError(f"the zygote refused: {reply.get('error')}")
        self.pid = reply["pid"]
        self._watcher = asyncio.create_task(self._watch(reader))
        self._tell(BlocksCleared())
        if has_events(spec):
            self._feed = KvFeed(self._uds, self._tell)
            self._feeding = asyncio.create_task(self._feed.read_forever())
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(
                path=self._uds, limit=0, keepalive_timeout=_KEEP_ALIVE_S
            ),
            auto_decompress=False,
        )

    async def _watch(self, reader: asyncio.StreamReader) -> None:
        """Wait until the zygote reports the server's exit, or exits itself."""
        try:
            line = await reader.readline()
        except OSError:
            line = b""
        if line:
            code = json.loads(line)["exit"]
            how = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
        else:
            how = "ended with its zygote"
            self._break_off()  # nothing else would end the server's connections
        self.pid = None
        if self._state is EngineState.STOPPED or self._death is None:
            return
        if self._state is EngineState.READY:
            self._state = EngineState.DEAD
        if self._why_given_up:
            how = f"{self._why_given_up}; it was killed"
        self._death.set_result(f"vLLM {how}; {self._log.last_words()}")

    async def _listen(self) -> None:
        """Kill the server when it hangs."""
        if self.pid is not None:
            self._give_up(await self._silence.until_hung(self.pid, self._server_model))

    def _give_up(self, why: str) -> None:
        """Kill a server that answers no more: its streams end, and `wait_dead` says `why`."""
        if self._state is not EngineState.READY or self.pid is None:
            return
        log.error("vLLM %s %s", self._name, why)
        self._why_given_up, self._state = why, EngineState.DEAD
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def _wait_healthy(self) -> None:
        assert self._death is not None and self._session is not None
        while not (self._death.done() or self._was_stopped()):
            if os.path.exists(self._uds):
                with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                    async with self._session.get(
                        "http://engine/health", timeout=_CONTROL_TIMEOUT
                    ) as response:
                        if response.status == 200:
                            return
            await asyncio.sleep(_HEALTH_POLL_S)
        raise EngineError(self._why_not_started(), 503)

    def _was_stopped(self) -> bool:
        return self._state is EngineState.STOPPED

    def _why_not_started(self) -> str:
        if self._death is not None and self._death.done():
            return self._death.result()
        return "the engine was stopped while it started"

    async def _ask_facts(self, start_s: float) -> EngineFacts:
        version = json.loads(await self._ask("GET", "/version"))["version"]
        models = json.loads(await self._ask("GET", "/v1/models"))["data"]
        served = next((m for m in models if m["id"] == self._model.name), models[0])
        capabilities = {"tokenize"}
        if self._spec.priority_scheduling:
            capabilities.add("priority")
        if self._spec.prefix_caching:
            capabilities.add("prefix-caching")
        kv_capacity_tokens, block_tokens = stream.kv_cache_of_metrics(
            await self._ask("GET", "/metrics")
        )
        return EngineFacts(
            kind="vllm",
            served_model=self._model.name,
            max_running=self._spec.max_num_seqs,
            context_tokens=int(served.get("max_model_len") or 0),
            simulated=False,
            start_s=start_s,
            version=str(version),
            kv_capacity_tokens=kv_capacity_tokens,
            block_tokens=block_tokens,
            host_tokens=self._offloading.tokens,
            host_bytes=self._offloading.size_bytes,
            template=await ask_template(self._ask, self._model.name, self._server_model),
            capabilities=frozenset(capabilities),
        )

    def _ready_session(self) -> aiohttp.ClientSession:
        if self._state is not EngineState.READY or self._session is None:
            raise EngineDeadError(f"the engine is {self._state}", 503)
        return self._session

    async def _ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        limit: aiohttp.ClientTimeout = _CONTROL_TIMEOUT,
    ) -> bytes:
        if self._session is None or self._session.closed:
            raise EngineDeadError(f"the engine is {self._state}", 503)
        headers = {"Content-Type": "application/json"} if body is not None else None
        try:
            async with self._session.request(
                method, f"http://engine{path}", data=body, headers=headers, timeout=limit
            ) as response:
                content = await response.read()
        except TimeoutError as exc:
            raise EngineError(f"the engine did not answer {path}", 504) from exc
        except (aiohttp.ClientError, OSError) as exc:
            raise self._lost(exc) from exc
        if response.status != 200:
            raise stream.http_error(response.status, content)
        return content

    def _lost(self, problem: aiohttp.ClientError | OSError) -> EngineDeadError:
        """The error for a connection that failed. A server that no longer listens is ending: it
        gets no more calls, and its zygote kills it if the end takes long."""
        cause = problem.os_error if isinstance(problem, aiohttp.ClientConnectorError) else problem
        if isinstance(cause, _NOT_LISTENING) and self._state is EngineState.READY:
            self._state = EngineState.DEAD
            if self._owner is not None:
                self._owner.write_eof()
        return EngineDeadError(f"lost the engine: {problem or type(problem).__name__}", 503)

    def _break_off(self) -> None:
        """End all answers being read with an error, whatever happens to the server."""
        for answer in self._answers:
            answer.content.set_exception(aiohttp.ClientPayloadError("the engine has ended"))

    async def _end(self) -> None:
        """Stop the server and free its resources, whatever state they are in."""
        session, self._session = self._session, None
        owner, self._owner = self._owner, None
        watcher, self._watcher = self._watcher, None
        if self._listener is not None:
            self._listener.cancel()
            self._listener = None
        if self._feeding is not None:
            self._feeding.cancel()
            self._feeding = None
        if owner is not None:
            # The zygote sees the end of file, stops the server and tells the watcher.
            with contextlib.suppress(OSError, RuntimeError):
                owner.write_eof()
            if watcher is not None:
                await asyncio.wait([watcher], timeout=_STOP_TIMEOUT_S)
                watcher.cancel()
            owner.close()
        own, self._own_zygote = self._own_zygote, None
        if own is not None:
            await own.stop()
        # Closing the session wakes none of its readers, and the server may outlive a zygote.
        self._break_off()
        if session is not None:
            await session.close()
        if self._feed is not None:
            self._feed.close()
            self._feed = None
        self._log.close()
        self.pid = None
        self._adapters.forget()
        if self._uds:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._uds)
