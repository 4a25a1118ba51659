// The OpenAI SDK for JavaScript: every endpoint that it has for text. Prints what came back.
import OpenAI from "openai";

const client = new OpenAI({
  baseURL: process.env.CATO_URL + "/v1",
  apiKey: process.env.CATO_API_KEY,
  maxRetries: 0,
  defaultHeaders: { "x-request-id": "openai-js" },
});
const messages = [{ role: "user", content: "Read a file." }];
const middle = {
  model: "cato-completion",
  prompt: "def read(path):\n    with open(path) as file:\n        return ",
  suffix: "\n",
};
const said = { models: [], completion: "", streamed: "", chat: "", chunks: 0, responses: [] };

for await (const model of client.models.list()) said.models.push(model.id);
said.completion = (await client.completions.create(middle)).choices[0].text;
for await (const chunk of await client.completions.create({ ...middle, stream: true }))
  said.streamed += chunk.choices[0]?.text ?? "";
const asked = { model: "demo-coder", messages, max_tokens: 32, stream: true, stream_options: { include_usage: true } };
for await (const chunk of await client.chat.completions.create(asked)) {
  said.chunks += 1;
  said.chat += chunk.choices[0]?.delta?.content ?? "";
  if (chunk.usage) said.usage = chunk.usage;
}
for await (const event of await client.responses.create({ model: "cato-auto", input: "Read a file.", stream: true })) {
  said.responses.push(event.type);
  if (event.type === "response.completed") said.response = event.response.output_text ?? event.response.output[0].content[0].text;
}
try {
  await client.chat.completions.create({ model: "nothing", messages });
} catch (error) {
  said.error = { kind: error.constructor.name, status: error.status, code: error.code };
}
console.log(JSON.stringify(said));
