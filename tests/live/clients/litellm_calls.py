"""litellm in each dialect that it has: prints what came back. Runs in an environment of its own."""

import json
import os

import litellm

URL, KEY = os.environ["CATO_URL"], os.environ["CATO_API_KEY"]
SAID = [{"role": "user", "content": "Read a file."}]


def target(dialect: str, base: str = "/v1") -> dict[str, object]:
    headers = {"x-request-id": f"litellm-{dialect}"}
    return {"api_base": f"{URL}{base}", "api_key": KEY, "extra_headers": headers}


def main() -> None:
    chat = litellm.completion("openai/cato-auto", SAID, **target("chat"))
    chunks = litellm.completion(
        "openai/demo-coder", SAID, stream=True, max_tokens=16, **target("stream")
    )
    completion = litellm.text_completion(
        model="text-completion-openai/cato-completion",
        prompt="def add(a, b):\n    return ",
        **target("completions"),
    )
    response = litellm.responses(
        model="openai/demo-coder", input="Read a file.", max_output_tokens=16, **target("responses")
    )
    message = litellm.completion(
        "anthropic/demo-coder", SAID, max_tokens=16, **target("messages", base="")
    )
    said = {
        "chat": chat.choices[0].message.content,
        "stream": "".join(c.choices[0].delta.content or "" for c in chunks),
        "completions": completion.choices[0].text,
        "responses": response.output[0].content[0].text,
        "messages": message.choices[0].message.content,
    }
    print(json.dumps(said))


main()
