"""The OpenAPI document: what every path takes and answers.

Dialects of others are described by what CATO reads of them and what every answer has; other fields
are passed on or ignored, as each operation says. The types of the whole are their owners'.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

Schema = dict[str, Any]
Responses = dict[int | str, dict[str, Any]]


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(required: str = "", /, **properties: Schema) -> Schema:
    """An object with at least `properties`, of which the `required` ones are always there."""
    schema: Schema = {"type": "object", "properties": properties}
    return {**schema, "required": required.split()} if required else schema


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
NUMBER: Schema = {"type": "number"}
COUNT: Schema = {"type": "integer", "minimum": 0}
LIMIT: Schema = {"type": "integer", "minimum": 1}
POSITIVE: Schema = {"type": "number", "exclusiveMinimum": 0}
STOPS = _or_null({"anyOf": [TEXT, _list(TEXT)]})
STREAM = _or_null({**FLAG, "default": False})
MODEL_NAME: Schema = {
    "type": "string",
    "description": "A real model, a virtual one such as `cato-completion`, or a virtual one behind "
    "a family's name such as `qwen2.5-coder:cato-completion`. The header `X-CATO-Task` and a base "
    "URL with `/t/{task}` overrule it. Without any, as `cato-auto`.",
}
MESSAGES_LIST = _list(_object("role", role=TEXT))
TIER: Schema = {"enum": ["auto", "default", "flex", "priority", "scale", "fast", None]}

SCHEMAS: dict[str, Schema] = {
    "Error": _object(
        "error",
        error=_object(
            "message type param code",
            message=TEXT,
            type=TEXT,
            param=_or_null(TEXT),
            code=_or_null(TEXT),
        ),
    ),
    "AnthropicError": _object(
        "type error",
        type={"const": "error"},
        error=_object("type message", type=TEXT, message=TEXT),
    ),
    "SlaClass": {"enum": ["interactive", "standard", "batch"]},
    "SlaTarget": {
        **_object("target_ms", metric={"enum": ["ttft", "tpot", "e2e"]}, target_ms=POSITIVE),
        "additionalProperties": False,
        "description": "Tightens the target of the task's own metric.",
    },
    "Sla": {"anyOf": [_ref("SlaClass"), _ref("SlaTarget"), {"type": "null"}]},
    "Cato": {
        **_object(
            inputs=_or_null({"type": "object", "description": "Inputs of the task by name."}),
            sla=_ref("Sla"),
            task=_or_null({**TEXT, "description": "Overrules the model."}),
            deadline_ms=_or_null(POSITIVE),
            tpot_ms=_or_null(POSITIVE),
            session_deadline_ms=_or_null(POSITIVE),
            receipt=_or_null({**FLAG, "description": "End a direct stream with the receipt."}),
        ),
        "additionalProperties": False,
    },
    "Receipt": {
        **_object(
            "request_id task status met",
            request_id=TEXT,
            task=TEXT,
            status={"enum": ["done", "failed", "cancelled", "refused", "deadline_exceeded"]},
            met=FLAG,
        ),
        "description": "The SLA receipt; times are in seconds.",
    },
    "Model": _object(
        "id object created owned_by type display_name created_at",
        id=TEXT,
        object={"const": "model"},
        created=COUNT,
        owned_by=TEXT,
        root=TEXT,
        max_model_len=_or_null(LIMIT),
        type={"const": "model"},
        display_name=TEXT,
        created_at=TEXT,
    ),
    "Usage": _object(
        "prompt_tokens completion_tokens total_tokens",
        prompt_tokens=COUNT,
        completion_tokens=COUNT,
        total_tokens=COUNT,
    ),
    "Completion": _object(
        "id object created model choices",
        id=TEXT,
        object={"const": "text_completion"},
        created=COUNT,
        model=TEXT,
        choices=_list(_object("index text", index=COUNT, text=TEXT)),
        usage=_ref("Usage"),
        cato=_ref("Receipt"),
    ),
    "ChatCompletion": _object(
        "id object created model choices",
        id=TEXT,
        object={"const": "chat.completion"},
        created=COUNT,
        model=TEXT,
        choices=_list(_object("index message", index=COUNT, message=_object("role", role=TEXT))),
        usage=_ref("Usage"),
        cato=_ref("Receipt"),
    ),
    "Response": _object(
        "id object created_at model status output",
        id=TEXT,
        object={"const": "response"},
        created_at=COUNT,
        model=TEXT,
        status=TEXT,
        output=_list({"type": "object"}),
        cato=_ref("Receipt"),
    ),
    "Message": _object(
        "id type role model content usage",
        id=TEXT,
        type={"const": "message"},
        role={"const": "assistant"},
        model=TEXT,
        content=_list(_object("type", type=TEXT)),
        usage=_object("input_tokens output_tokens", input_tokens=COUNT, output_tokens=COUNT),
        cato=_ref("Receipt"),
    ),
    "TabbySegments": _object(
        "prefix",
        prefix=TEXT,
        suffix=_or_null(TEXT),
        filepath=_or_null(TEXT),
        declarations=_or_null(_list({"type": "object"})),
        relevant_snippets_from_changed_files=_or_null(_list({"type": "object"})),
        relevant_snippets_from_recently_opened_files=_or_null(_list({"type": "object"})),
    ),
    "Infill": {
        **_object(
            "content",
            content=TEXT,
            stop=FLAG,
            tokens_evaluated=COUNT,
            tokens_predicted=COUNT,
            timings={"type": "object"},
        ),
        "description": "With `response_fields` only `content` and these.",
    },
    "Task": _object(
        "name description model sla streams inputs nodes",
        name=TEXT,
        description=TEXT,
        model=TEXT,
        sla=_object(
            "metric target_ms hard_deadline_ms",
            metric=TEXT,
            target_ms=NUMBER,
            hard_deadline_ms=NUMBER,
        ),
        streams=FLAG,
        inputs=_list(_object("name type required", name=TEXT, type=TEXT, required=FLAG)),
        nodes=_list(_object("id type", id=TEXT, type=TEXT)),
    ),
    "TaskAnswer": _object(
        "id task output text cato",
        id=TEXT,
        task=TEXT,
        output={},
        text=TEXT,
        cato=_ref("Receipt"),
    ),
}


def _answers(schema: Schema, *, events: str = "", what: str = "The answer.") -> Responses:
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if events:
        event = _object("data", event=TEXT, data=TEXT)
        content["text/event-stream"] = {"schema": {**event, "description": events}}
    return {200: {"description": what, "content": content}}


def _operation(body: Schema, answer: Schema, *, events: str = "") -> dict[str, Any]:
    """Keyword arguments of a route that takes a JSON body."""
    taken = {"required": True, "content": {"application/json": {"schema": body}}}
    return {
        "responses": _answers(answer, events=events),
        "openapi_extra": {"requestBody": taken},
    }


CHUNKS = "With `stream`: chunks, then `data: [DONE]`. An error after the first is a chunk `error`."
TYPED = "With `stream`: the dialect's typed events; the last has the receipt as `cato`."

COMPLETION_BODY = _object(
    "prompt",
    model=MODEL_NAME,
    prompt={
        "anyOf": [TEXT, _list(TEXT), _list(COUNT), _list(_list(COUNT))],
        "description": "A task takes one text. Fill-in-the-middle sentinels of any known family "
        "are read, and written again for the model that answers.",
    },
    suffix=_or_null(TEXT),
    max_tokens=_or_null(LIMIT),
    stop=STOPS,
    stream=STREAM,
    stream_options=_or_null({"type": "object"}),
    service_tier=TIER,
    cato=_or_null(_ref("Cato")),
)
TABBY_BODY = _object("segments", segments=_ref("TabbySegments"), language=_or_null(TEXT))

COMPLETIONS = _operation(
    {"anyOf": [COMPLETION_BODY, TABBY_BODY]}, _ref("Completion"), events=CHUNKS
)
CHAT = _operation(
    _object(
        "messages",
        model=MODEL_NAME,
        messages=MESSAGES_LIST,
        tools=_or_null(_list({"type": "object"})),
        max_tokens=_or_null(LIMIT),
        max_completion_tokens=_or_null(LIMIT),
        stop=STOPS,
        stream=STREAM,
        stream_options=_or_null({"type": "object"}),
        service_tier=TIER,
        cato=_or_null(_ref("Cato")),
    ),
    _ref("ChatCompletion"),
    events=CHUNKS,
)
FIM = _operation(
    _object(
        "prompt",
        model=MODEL_NAME,
        prompt=TEXT,
        suffix=_or_null(TEXT),
        max_tokens=_or_null(LIMIT),
        stop=STOPS,
        stream=STREAM,
        cato=_or_null(_ref("Cato")),
    ),
    _ref("ChatCompletion"),
    events=CHUNKS,
)
RESPONSES = _operation(
    _object(
        "input",
        model=MODEL_NAME,
        input={"anyOf": [TEXT, _list({"type": "object"})]},
        instructions=_or_null(TEXT),
        tools=_or_null(_list({"type": "object"})),
        max_output_tokens=_or_null(LIMIT),
        stream=STREAM,
        store=_or_null({**FLAG, "description": "Nothing is stored."}),
        service_tier=TIER,
        cato=_or_null(_ref("Cato")),
    ),
    _ref("Response"),
    events=TYPED,
)
_CONVERSATION = {
    "model": MODEL_NAME,
    "messages": MESSAGES_LIST,
    "system": _or_null({"anyOf": [TEXT, _list({"type": "object"})]}),
    "tools": _or_null(_list({"type": "object"})),
    "cato": _or_null(_ref("Cato")),
}
MESSAGES = _operation(
    _object(
        "messages max_tokens",
        **_CONVERSATION,
        max_tokens=LIMIT,
        stop_sequences=_or_null(_list(TEXT)),
        stream=STREAM,
    ),
    _ref("Message"),
    events=TYPED,
)
COUNT_TOKENS = _operation(
    _object("messages", **_CONVERSATION), _object("input_tokens", input_tokens=COUNT)
)
INFILL = _operation(
    _object(
        input_prefix=_or_null(TEXT),
        prompt=_or_null(TEXT),
        input_suffix=_or_null(TEXT),
        input_extra=_or_null(_list(_object(filename=TEXT, text=TEXT))),
        n_predict=_or_null({"type": "integer"}),
        t_max_prompt_ms=_or_null({"type": "number", "minimum": 0}),
        t_max_predict_ms=_or_null({"type": "number", "minimum": 0}),
        stop=STOPS,
        stream=STREAM,
        response_fields=_or_null(_list(TEXT)),
        model=_or_null(MODEL_NAME),
        cato=_or_null(_ref("Cato")),
    ),
    _ref("Infill"),
    events="With `stream`: pieces with `content`, the last with the counts.",
)
TOKENIZE = _operation(
    _object("model", model=MODEL_NAME, prompt=_or_null(TEXT), messages=_or_null(MESSAGES_LIST)),
    _object("count tokens", count=COUNT, tokens=_list(COUNT)),
)
DETOKENIZE = _operation(
    _object("model tokens", model=MODEL_NAME, tokens=_list(COUNT)), _object("prompt", prompt=TEXT)
)
EMBEDDINGS = _operation(
    _object("model input", model=MODEL_NAME, input={}),
    _object("object data model", object={"const": "list"}, data=_list({"type": "object"})),
)
SCORE = _operation(
    _object(
        "model",
        model=MODEL_NAME,
        text_1={"description": "Or `data_1`, or `queries`."},
        text_2={"description": "Or `data_2`, `documents` or `items`."},
    ),
    _object("object data model", object={"const": "list"}, data=_list({"type": "object"})),
)
RERANK = _operation(
    _object("model query documents", model=MODEL_NAME, query={}, documents={}),
    _object("results model", results=_list({"type": "object"}), model=TEXT),
)
_FILE = _object(
    "id object bytes created_at filename purpose status",
    id=TEXT,
    object={"const": "file"},
    bytes=COUNT,
    created_at=COUNT,
    filename=TEXT,
    purpose=TEXT,
    status=TEXT,
)
_BATCH = _object(
    "id object endpoint input_file_id status created_at request_counts",
    id=TEXT,
    object={"const": "batch"},
    endpoint=TEXT,
    input_file_id=TEXT,
    completion_window=TEXT,
    status={
        "enum": [
            "validating", "failed", "in_progress", "completed", "expired", "cancelling", "cancelled"
        ]
    },
    output_file_id=_or_null(TEXT),
    error_file_id=_or_null(TEXT),
    errors=_or_null({"type": "object"}),
    created_at=COUNT,
    expires_at=COUNT,
    request_counts=_object(
        "total completed failed", total=COUNT, completed=COUNT, failed=COUNT
    ),
    metadata={"type": "object"},
)  # fmt: skip
UPLOAD: dict[str, Any] = {
    "responses": _answers(_FILE),
    "openapi_extra": {
        "requestBody": {
            "required": True,
            "content": {
                "multipart/form-data": {
                    "schema": _object(
                        "file purpose",
                        file={"type": "string", "format": "binary"},
                        purpose={"const": "batch"},
                    )
                }
            },
        }
    },
}
FILE = _answers(_FILE)
FILES = _answers(_object("object data", object={"const": "list"}, data=_list(_FILE)))
DELETED = _answers(_object("id object deleted", id=TEXT, object={"const": "file"}, deleted=FLAG))
CONTENT: Responses = {
    200: {"description": "The lines.", "content": {"application/jsonl": {"schema": TEXT}}}
}
BATCH = _answers(_BATCH)
BATCHES = _answers(_object("object data", object={"const": "list"}, data=_list(_BATCH)))
START_BATCH = _operation(
    _object(
        "input_file_id endpoint completion_window",
        input_file_id=TEXT,
        endpoint={**TEXT, "description": "The path that every line of the file names."},
        completion_window={**TEXT, "description": "Hours, such as 24h; later lines expire."},
        metadata=_or_null({"type": "object"}),
    ),
    _BATCH,
)
TABBY_HEALTH = _answers(
    _object(
        "model chat_model device arch cpu_info cpu_count cuda_devices version",
        model=_or_null(TEXT),
        chat_model=_or_null(TEXT),
        device=TEXT,
        arch=TEXT,
        cpu_info=TEXT,
        cpu_count=COUNT,
        cuda_devices=_list(TEXT),
        version=_object(
            "build_date build_timestamp git_sha git_describe",
            build_date=TEXT,
            build_timestamp=TEXT,
            git_sha=TEXT,
            git_describe=TEXT,
        ),
    )
)
TABBY_SETTING = _answers(
    _object("disable_client_side_telemetry", disable_client_side_telemetry=FLAG)
)
TABBY_EVENT: dict[str, Any] = {
    "responses": {200: {"description": "Noted."}},
    "openapi_extra": {
        "parameters": [
            {"name": "select_kind", "in": "query", "required": False, "schema": TEXT},
        ],
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": _object(
                        "type completion_id",
                        type={"enum": ["view", "select", "dismiss"]},
                        completion_id={"type": "string", "minLength": 1},
                        choice_index=_or_null(COUNT),
                        view_id=_or_null(TEXT),
                        elapsed=_or_null(COUNT),
                    )
                }
            },
        },
    },
}
RUN = _operation(
    {
        **_object(
            inputs=_or_null({"type": "object"}),
            stream=STREAM,
            sla=_ref("Sla"),
            deadline_ms=_or_null(POSITIVE),
            tpot_ms=_or_null(POSITIVE),
        ),
        "additionalProperties": False,
    },
    _ref("TaskAnswer"),
    events="With `stream`: `event: text`s, then `event: done` or `event: error`, then `[DONE]`.",
)
TASKS = _answers(_object("object data", object={"const": "list"}, data=_list(_ref("Task"))))
TASK = _answers(_ref("Task"))
TASK_SLA = _answers(
    _object(
        "task metric target_ms hard_deadline_ms baseline_ms warning",
        task=TEXT,
        metric=TEXT,
        target_ms=NUMBER,
        hard_deadline_ms=NUMBER,
        baseline_ms={"type": ["number", "null"]},
        warning=TEXT,
    )
)
MODELS = _answers(_object("object data", object={"const": "list"}, data=_list(_ref("Model"))))
MODEL = _answers(_ref("Model"))
HEALTH = _answers(_object("status", status={"const": "ok"}))
_READY = _object("status", status=TEXT, reason=TEXT, notes=_list(TEXT))
READY: Responses = {
    **_answers(_READY),
    503: {"description": "Not ready.", "content": {"application/json": {"schema": _READY}}},
}
METRICS: Responses = {
    200: {"description": "Prometheus' text form.", "content": {"text/plain": {"schema": TEXT}}}
}


def _query(name: str, schema: Schema, description: str) -> Schema:
    """A parameter of a query that may be left out."""
    return {
        "name": name, "in": "query", "required": False, "description": description,
        "schema": schema,
    }  # fmt: skip


RECEIPT = _answers(_ref("Receipt"))
_USED = _object(
    "requests prompt_tokens cached_prompt_tokens output_tokens cost",
    day=TEXT,
    tenant=TEXT,
    key={
        **TEXT,
        "description": "The public part of an API key, or `oidc:` and the subject of a token; "
        "empty without one.",
    },
    task=TEXT,
    model=TEXT,
    cost=_or_null({**NUMBER, "description": "Null without a price."}),
    requests=COUNT,
    prompt_tokens=COUNT,
    cached_prompt_tokens=COUNT,
    output_tokens=COUNT,
)
_TURN = _object(
    "request_id session turn parent kind model prompt_tokens cached_prompt_tokens output_tokens"
    " met",
    request_id=TEXT,
    session=TEXT,
    turn=COUNT,
    parent={**TEXT, "description": "The session that started this one; empty without one."},
    kind=TEXT,
    model=TEXT,
    prompt_tokens=COUNT,
    cached_prompt_tokens=COUNT,
    output_tokens=COUNT,
    met={"type": "boolean"},
    status=TEXT,
    metric=TEXT,
    target_s=_or_null(NUMBER),
    think_s=_or_null({**NUMBER, "description": "Since the turn before."}),
    ttft_s=_or_null(NUMBER),
    e2e_s=_or_null(NUMBER),
    uncached_prompt_tokens=COUNT,
    replica=TEXT,
    placement={"enum": ["", "home", "moved", "new"]},
    home={**TEXT, "description": "The replica of the turn before."},
    reason={**TEXT, "description": "Why it went to its replica."},
    session_slack_s=_or_null(
        {**NUMBER, "description": "What a session with a target had to spare when it ended."}
    ),
)
_DAY: Schema = {"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}$"}
USAGE: dict[str, Any] = {
    "responses": {
        200: {
            "description": "A row for each day, tenant, key, task and model, or for each of what "
            "`by` names, or for each turn.",
            "content": {
                "application/json": {
                    "schema": _object(
                        "object data currency",
                        object={"const": "list"},
                        data=_list({"anyOf": [_USED, _TURN]}),
                        currency={**TEXT, "description": "Of `cost`; empty without prices."},
                    )
                },
                "text/csv": {"schema": TEXT},
            },
        }
    },
    "openapi_extra": {
        "parameters": [
            {
                "name": "format",
                "in": "query",
                "required": False,
                "schema": {"enum": ["json", "csv"], "default": "json"},
            },
            {
                "name": "session",
                "in": "query",
                "required": False,
                "schema": {"type": "string"},
            },
            _query("by", {"type": "string"}, "Such as `day,model`: what rows are summed up by."),
            _query("since", _DAY, "The first day, in UTC."),
            _query("until", _DAY, "The last day."),
        ],
    },
}
_ARM_COUNTS = _object(
    "calls errors met shown taken",
    calls=COUNT,
    errors=COUNT,
    met=COUNT,
    mean_ttft_s=_or_null(NUMBER),
    shown=COUNT,
    taken=COUNT,
)
_ROLLOUT = _object(
    "object name stable canary phase share outlook stable_counts canary_counts measures history",
    object={"const": "rollout"},
    name=TEXT,
    stable=TEXT,
    canary=TEXT,
    phase={"enum": ["shadow", "canary", "promoted", "rolled-back"]},
    share=NUMBER,
    since_s=NUMBER,
    outlook={**TEXT, "description": "What the rule says of the present step."},
    stable_counts=_ARM_COUNTS,
    canary_counts=_ARM_COUNTS,
    measures=_list(
        _object(
            "name stable canary low high surely limit",
            name=TEXT,
            stable=NUMBER,
            canary=NUMBER,
            low=NUMBER,
            high=NUMBER,
            surely=NUMBER,
            limit=NUMBER,
        )
    ),
    rule={"type": "object"},
    history=_list(_object("at_s phase share why", at_s=NUMBER, phase=TEXT, share=NUMBER, why=TEXT)),
)
_SHARE: Schema = {"type": "number", "minimum": 0, "maximum": 1}
ROLLOUTS = _answers(_object("object data", object={"const": "list"}, data=_list(_ROLLOUT)))
START_ROLLOUT = _operation(
    _object(
        "name canary",
        name={**TEXT, "description": "What clients call: the name of a model, or another of its."},
        canary={**TEXT, "description": "The model that is to take over."},
        rule=_or_null(
            _object(
                shares=_list(_SHARE),
                shadow_share=_SHARE,
                min_calls=LIMIT,
                max_calls=LIMIT,
                hold_s=NUMBER,
                min_shown=LIMIT,
                miss_limit=_SHARE,
                error_limit=_SHARE,
                ttft_limit=_SHARE,
                acceptance_limit=_SHARE,
            )
        ),
    ),
    _ROLLOUT,
)
ROLLOUT_STEP = _operation(_object("name", name=TEXT), _ROLLOUT)

_NUMBER_OR_NONE = _or_null(LIMIT)
_LIMITS: Schema = {
    "requests_per_minute": _NUMBER_OR_NONE,
    "tokens_per_minute": _NUMBER_OR_NONE,
    "tokens_per_month": _NUMBER_OR_NONE,
    "weight": {"type": "number", "minimum": 0.01, "maximum": 1_000_000},
}
_TENANT = _object(
    "name requests_per_minute tokens_per_minute tokens_per_month weight keys spent_tokens",
    name=TEXT,
    **_LIMITS,
    keys={**COUNT, "description": "Those that are valid."},
    spent_tokens={**COUNT, "description": "Of this month, in UTC."},
)
_KEY_RIGHTS: Schema = {
    "tenant": TEXT,
    "name": {**TEXT, "maxLength": 100},
    "role": {"enum": ["user", "tenant-admin", "operator"]},
    "tasks": {**_list(TEXT), "description": "Those that it may run; none: all."},
    "models": {**_list(TEXT), "description": "Those that it may call; none: all."},
    "default_task": {**TEXT, "description": "Of conversations that name no task."},
    "bounds": {
        "type": "object",
        "additionalProperties": COUNT,
        "description": "What one call may ask of an engine instead of the usual.",
    },
}
_KEY = _object(
    "id tenant name role sla_class tasks models default_task created_at_s expires_at_s bounds "
    "session_target_s is_valid",
    id=TEXT,
    sla_class=_ref("SlaClass"),
    **_KEY_RIGHTS,
    created_at_s=NUMBER,
    expires_at_s=_or_null(NUMBER),
    session_target_s=_or_null(NUMBER),
    is_valid=FLAG,
    secret={**TEXT, "description": "The whole key; in the answer that makes it alone."},
)
_ENTRY = _object(
    "id at_s who action tenant target before after",
    id=LIMIT,
    at_s=NUMBER,
    who={**TEXT, "description": "`key:ID`, `oidc:SUBJECT` or `cli:USER@HOST`."},
    action=TEXT,
    tenant=TEXT,
    target=TEXT,
    before=_or_null({"type": "object"}),
    after=_or_null({"type": "object"}),
)


def _rows(schema: Schema) -> Responses:
    return _answers(_object("object data", object={"const": "list"}, data=_list(schema)))


def _asked(properties: Schema, answer: Schema) -> dict[str, Any]:
    """An operation with a body of `properties` alone."""
    return _operation({**_object(**properties), "additionalProperties": False}, answer)


TENANTS = _answers(
    _object(
        "object data role",
        object={"const": "list"},
        data=_list(_TENANT),
        role={**_KEY_RIGHTS["role"], "description": "The caller's own."},
    )
)
TENANT = _asked(_LIMITS, _TENANT)
KEYS = _rows(_KEY)
KEY = _answers(_KEY)
NEW_KEY = _asked(
    {
        **_KEY_RIGHTS,
        "sla": _ref("SlaClass"),
        "days": {**POSITIVE, "description": "Valid for so long; for ever without."},
        "session_minutes": POSITIVE,
    },
    _KEY,
)
ROTATED_KEY = _asked({"hours": {"type": "number", "minimum": 0, "default": 24}}, _KEY)
AUDIT: dict[str, Any] = {
    "responses": _rows(_ENTRY),
    "openapi_extra": {
        "parameters": [
            _query("limit", {"type": "integer", "minimum": 1, "maximum": 1000}, "Entries."),
            _query("below", LIMIT, "The id of the last entry that was seen."),
        ]
    },
}

ADMIN_PATH = "/v1/admin/"
# Headers that every dialect's requests may have.
HINTS = [
    {
        "name": name,
        "in": "header",
        "required": False,
        "description": description,
        "schema": schema,
    }
    for name, description, schema in (
        ("X-CATO-Task", "The task; overrules base URL and model.", TEXT),
        ("X-CATO-SLA", "The class of the SLA.", _ref("SlaClass")),
        ("X-CATO-Deadline-Ms", "The first token, or a whole answer, by then.", POSITIVE),
        ("X-CATO-TPOT-Ms", "The time for each token after the first.", POSITIVE),
        (
            "X-CATO-Session-Deadline-Ms",
            "The session's last answer, counted from its first call.",
            POSITIVE,
        ),
        ("X-CATO-Buffer", "Ends the request under way that has the same value.", TEXT),
    )
]
# Needed as soon as an API key is configured; one of them is enough.
SECURITY: Schema = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    "api-key": {"type": "apiKey", "in": "header", "name": "api-key"},
}
SERVERS = [
    {"url": "/"},
    {
        "url": "/t/{task}",
        "description": "For clients that can set nothing but a base URL.",
        "variables": {"task": {"default": "completion", "description": "A task's name."}},
    },
    {
        "url": "/t/{task}/{sla}",
        "variables": {
            "task": {"default": "completion"},
            "sla": {"default": "standard", "enum": ["interactive", "standard", "batch"]},
        },
    },
]


def install(app: FastAPI) -> None:
    """Let `app.openapi()` give the whole document."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    for path, operations in document["paths"].items():
        error = _ref("AnthropicError" if path.startswith("/v1/messages") else "Error")
        for method, operation in operations.items():
            _complete(operation, error)
            if method == "post" and not path.startswith(ADMIN_PATH):
                operation["parameters"] = [*operation.get("parameters", ()), *HINTS]
    document["components"] = {"schemas": SCHEMAS, "securitySchemes": SECURITY}
    document["security"] = [{name: []} for name in SECURITY]
    document["servers"] = SERVERS
    return document


def _complete(operation: dict[str, Any], error: Mapping[str, Any]) -> None:
    """Name the errors of an operation; a request that is not valid is answered with 400."""
    responses = operation["responses"]
    responses.pop("422", None)
    responses["default"] = {
        "description": "Not served; `X-CATO-Problem` says more.",
        "content": {"application/json": {"schema": dict(error)}},
    }
