// Drives a server with the official npm clients: `node drive.mjs BASE_URL`; prints what each of them understood, as JSON.
import Anthropic from "@anthropic-ai/sdk";
import { Ollama } from "ollama";
import OpenAI, { toFile } from "openai";

const base = process.argv[2], apiKey = process.argv[3] ?? "any";
const call = '<tool_call>\n{"name": "weather", "arguments": {"place": "Rome"}}\n</tool_call>';
const text = `<think>\nlook\n</think>\nOne moment.\n${call}`;
const schema = { type: "object", properties: { place: { type: "string" } }, required: ["place"] };
const messages = [{ role: "user", content: text }];
const out = {};

const openai = new OpenAI({ baseURL: `${base}/v1`, apiKey, maxRetries: 0 });
const tools = [{ type: "function", function: { name: "weather", parameters: schema } }];
{
  const stream = openai.chat.completions.stream({ model: "fake", messages, tools });
  const choice = (await stream.finalChatCompletion()).choices[0];
  const called = choice.message.tool_calls[0].function;
  out.chat = [choice.message.content.trim(), called.name, JSON.parse(called.arguments), choice.finish_reason];
  const whole = await openai.completions.create({ model: "fake", prompt: "ab", logprobs: 1 });
  out.completions = [whole.choices[0].text, whole.choices[0].logprobs.tokens];
  const vectors = await openai.embeddings.create({ model: "fake", input: ["a", "b"] });
  out.embeddings = vectors.data.map((each) => each.embedding.length);
  out.models = (await openai.models.list()).data.map((each) => each.id);
  try {
    await openai.chat.completions.create({ model: "other", messages });
  } catch (error) {
    out.refused = [error.constructor.name, error.status, error.code];
  }
}
{
  const flat = [{ type: "function", name: "weather", parameters: schema, strict: false }];
  const stream = openai.responses.stream({ model: "fake", input: text, tools: flat });
  const kinds = new Set();
  for await (const event of stream) kinds.add(event.type);
  const final = await stream.finalResponse();
  out.responses = [final.output.map((item) => item.type), final.output_text.trim(), JSON.parse(final.output[2].arguments), final.status];
  out.events = [...kinds].includes("response.function_call_arguments.done");
}
{
  const anthropic = new Anthropic({ baseURL: base, apiKey, maxRetries: 0 });
  const named = [{ name: "weather", input_schema: schema }];
  const stream = anthropic.messages.stream({ model: "fake", max_tokens: 999, messages, tools: named });
  const final = await stream.finalMessage();
  out.messages = [final.content.map((block) => block.type), final.content[2].input, final.stop_reason];
  const counted = await anthropic.messages.countTokens({ model: "fake", messages: [{ role: "user", content: "hello" }] });
  out.counted = counted.input_tokens;
  try {
    await anthropic.messages.create({ model: "other", max_tokens: 9, messages });
  } catch (error) {
    out.unknown = [error.constructor.name, error.status];
  }
}
{
  const ollama = new Ollama({ host: base, headers: { authorization: `Bearer ${apiKey}` } });
  let content = "", calls = [];
  for await (const part of await ollama.chat({ model: "fake", messages, tools, stream: true })) {
    content += part.message.content;
    calls = calls.concat(part.message.tool_calls ?? []);
  }
  out.ollama = [content.trim(), calls.map((each) => each.function)];
  out.generated = (await ollama.generate({ model: "fake", prompt: "ab" })).response;
  out.embedded = (await ollama.embed({ model: "fake", input: ["a", "b"] })).embeddings.length;
  out.tags = (await ollama.list()).models.map((each) => each.name);
}
{
  const url = "/v1/chat/completions";
  const line = (id) => JSON.stringify({ custom_id: id, method: "POST", url, body: { model: "fake", messages: [{ role: "user", content: id }] } });
  const file = await openai.files.create({
    file: await toFile(Buffer.from(`${line("a")}\n${line("b")}\n`), "lines.jsonl"),
    purpose: "batch",
    expires_after: { anchor: "created_at", seconds: 3600 },
  });
  let batch = await openai.batches.create({ input_file_id: file.id, endpoint: url, completion_window: "24h", metadata: { a: "b" } });
  while (!["completed", "failed"].includes(batch.status)) {
    await new Promise((done) => setTimeout(done, 20));
    batch = await openai.batches.retrieve(batch.id);
  }
  const text = await (await openai.files.content(batch.output_file_id)).text();
  const said = text.trim().split("\n").map(JSON.parse).map((each) => [each.custom_id, each.response.body.choices[0].message.content]);
  const names = [];
  for await (const each of openai.files.list({ order: "asc" })) names.push(each.filename.replace(batch.id, "batch"));
  out.batch = [batch.status, batch.request_counts.completed, said, batch.metadata.a, names];
  out.deleted = (await openai.files.delete(file.id)).deleted;
  for await (const each of openai.batches.list()) out.listed = each.id === batch.id;
  try {
    await openai.batches.cancel(batch.id);
  } catch (error) {
    out.cancelled = [error.constructor.name, error.status];
  }
}
console.log(JSON.stringify(out));
