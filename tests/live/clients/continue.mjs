// What the plugins of Continue run: its adapters for the providers of deployments/clients/continue.yaml.
import { constructLlmApi } from "@continuedev/openai-adapters";

const api = (provider, model, id) =>
  constructLlmApi({
    provider,
    model,
    apiBase: process.env.CATO_URL + "/v1/",
    apiKey: process.env.CATO_API_KEY,
    requestOptions: { headers: { "x-request-id": id } },
  });
const go = new AbortController().signal;
const prefix = "def read(path):\n    with open(path) as file:\n        return ";
const messages = [{ role: "user", content: "Read a file." }];
const said = { fim: "", completion: "", chat: "", aborted: 0 };

const middle = { model: "cato-completion", prompt: prefix, suffix: "\n", max_tokens: 4096, stream: true };
for await (const chunk of api("mistral", "cato-completion", "continue-fim").fimStream(middle, go))
  said.fim += chunk.choices[0]?.delta?.content ?? "";

// Continue writes the tokens of the family that it takes the model's name for; these are StarCoder's.
const marked = `<fim_prefix>${prefix}<fim_suffix>\n<fim_middle>`;
const sentinels = { model: "cato-completion", prompt: marked, max_tokens: 4096, temperature: 0.01, stream: true };
for await (const chunk of api("openai", "cato-completion", "continue-completion").completionStream(sentinels, go))
  said.completion += chunk.choices[0]?.text ?? "";

const asked = { model: "cato-auto", messages, stream: true };
for await (const chunk of api("openai", "cato-auto", "continue-chat").chatCompletionStream(asked, go))
  said.chat += chunk.choices[0]?.delta?.content ?? "";

// A person types on: the plugin leaves the stream after its first text.
const leave = new AbortController();
const long = { model: "demo-coder", messages, max_tokens: 2000, stream: true };
try {
  for await (const chunk of api("openai", "demo-coder", "continue-abort").chatCompletionStream(long, leave.signal)) {
    said.aborted += 1;
    leave.abort();
  }
} catch (error) {
  said.abort = error.name;
}
console.log(JSON.stringify(said));
