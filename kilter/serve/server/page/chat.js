// The chat box: a conversation over /v1/chat/completions, streamed, with each answer's figures.

import { request } from "/page/access.js";
import { count } from "/page/chart.js";

const byId = id => document.getElementById(id);
const talk = byId("talk"), question = byId("question"), send = byId("send"), stop = byId("stop");
const hint = talk.firstElementChild;

let messages = [];
let running = null;  // AbortController of the answer being written

/** Wires the chat box up. modelName() is the name that requests ask for. */
export function startChat(modelName) {
  byId("ask").addEventListener("submit", event => {
    event.preventDefault();
    if (running === null && question.value.trim()) converse(modelName());
  });
  question.addEventListener("keydown", event => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      byId("ask").requestSubmit();
    }
  });
  stop.addEventListener("click", () => running?.abort());
  byId("fresh").addEventListener("click", () => {
    running?.abort();
    messages = [];
    talk.replaceChildren(hint);
    question.focus();
  });
}

async function converse(model) {
  hint.remove();
  const controller = running = new AbortController();
  const conversation = messages;
  conversation.push({ role: "user", content: question.value.trim() });
  say("user", question.value.trim());
  question.value = "";
  const answer = say("assistant", "");
  const figures = { begun: performance.now(), first: null, last: null, pieces: 0, usage: null };
  busy(true);
  let problem = null;
  try {
    await read(await post(model, conversation, controller.signal), answer, figures);
  } catch (error) {
    problem = error.name === "AbortError" ? null : error.message;
  }
  if (answer.textContent) conversation.push({ role: "assistant", content: answer.textContent });
  else conversation.pop();  // nothing came: the next question stands alone
  if (conversation === messages) {
    if (!answer.textContent) answer.remove();
    if (problem !== null) say("problem", problem);
    else note(figures, controller.signal.aborted);
  }
  if (running === controller) {
    running = null;
    busy(false);
  }
}

async function post(model, conversation, signal) {
  const response = await request("/v1/chat/completions", {
    method: "POST",
    signal,
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({
      model,
      messages: conversation,
      temperature: Number(byId("temperature").value),
      max_tokens: Number(byId("max-tokens").value),
      stream: true,
      stream_options: { include_usage: true },
    }),
  });
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new Error(body?.error?.message ?? `The server answered with status ${response.status}.`);
  }
  return response;
}

/** Writes a stream of server-sent events into the answer as they come. */
async function read(response, answer, figures) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (data && data !== "[DONE]") take(JSON.parse(data), answer, figures);
    }
  }
}

function take(chunk, answer, figures) {
  if (chunk.error) throw new Error(chunk.error.message);
  if (chunk.usage) figures.usage = chunk.usage;
  const text = chunk.choices?.[0]?.delta?.content;
  if (!text) return;
  figures.last = performance.now();
  figures.first ??= figures.last;
  figures.pieces += 1;
  const atEnd = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 40;
  answer.append(text);
  if (atEnd) talk.scrollTop = talk.scrollHeight;
}

/** A line of figures below an answer. */
function note(figures, stopped) {
  const parts = [];
  if (figures.first !== null) {
    parts.push(`first token ${count(Math.round(figures.first - figures.begun))} ms`);
  }
  const seconds = (figures.last - figures.first) / 1000;
  const tokens = figures.usage?.completion_tokens ?? figures.pieces;
  if (tokens > 1 && seconds > 0) {
    parts.push(`${count(Number(((tokens - 1) / seconds).toPrecision(3)))} tokens/s`);
  }
  if (figures.usage) {
    const cached = figures.usage.prompt_tokens_details?.cached_tokens ?? 0;
    parts.push(`${count(cached)} of ${count(figures.usage.prompt_tokens)} cached`);
  }
  if (stopped) parts.push("stopped");
  say("figures", parts.join(" · "));
}

function say(kind, text) {
  const element = document.createElement("div");
  element.className = kind === "figures" ? kind : `said ${kind}`;
  element.textContent = text;
  talk.append(element);
  talk.scrollTop = talk.scrollHeight;
  return element;
}

function busy(now) {
  send.hidden = now;
  stop.hidden = !now;
}
