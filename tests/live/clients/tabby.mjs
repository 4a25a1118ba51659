// An editor in front of tabby-agent's language server: one completion at a cursor.
import { spawn } from "node:child_process";

const agent = spawn(process.execPath, [process.argv[2], "--lsp", "--stdio"], { stdio: ["pipe", "pipe", "inherit"] });
const waiting = new Map();
let ids = 0;
let bytes = Buffer.alloc(0);

function send(message) {
  const text = JSON.stringify({ jsonrpc: "2.0", ...message });
  agent.stdin.write(`Content-Length: ${Buffer.byteLength(text)}\r\n\r\n${text}`);
}
function ask(method, params) {
  const id = ++ids;
  send({ id, method, params });
  return new Promise((done) => waiting.set(id, done));
}
function heard(message) {
  if (message.method && message.id !== undefined) send({ id: message.id, result: null });
  else waiting.get(message.id)?.(message);
}
agent.stdout.on("data", (data) => {
  bytes = Buffer.concat([bytes, data]);
  for (;;) {
    const end = bytes.indexOf("\r\n\r\n");
    const length = end < 0 ? NaN : Number(/Content-Length: (\d+)/i.exec(bytes.subarray(0, end))[1]);
    if (!(bytes.length >= end + 4 + length)) return;
    heard(JSON.parse(bytes.subarray(end + 4, end + 4 + length)));
    bytes = bytes.subarray(end + 4 + length);
  }
});

await ask("initialize", { processId: process.pid, rootUri: null, capabilities: { textDocument: { completion: {} } } });
send({ method: "initialized", params: {} });
const uri = "file:///demo/read.py";
const text = "def read(path):\n    with open(path) as file:\n        return \n";
send({ method: "textDocument/didOpen", params: { textDocument: { uri, languageId: "python", version: 1, text } } });
const position = { line: 2, character: 15 };
const context = { triggerKind: 1 };
// Until the server's health is known the agent answers nothing.
let items = [];
for (let tries = 0; tries < 60 && items.length === 0; tries++) {
  const answer = await ask("textDocument/completion", { textDocument: { uri }, position, context });
  if (answer.error) throw new Error(JSON.stringify(answer.error));
  items = answer.result?.items ?? [];
  if (items.length === 0) await new Promise((done) => setTimeout(done, 500));
}
console.log(JSON.stringify(items));
agent.kill();
