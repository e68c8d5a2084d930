/* Requests to the server that sent this page. */

import { apiKey } from "./store.js";

/** A refusal or failure. status: of HTTP, 0 when no answer came. code: of the table in docs/api.md. */
export class APIError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** unauthorized(): called when the server wants a key, or another one. */
export const hooks = { unauthorized: () => {} };

function headersOf(body) {
  const headers = {};
  if (body !== undefined) headers["content-type"] = "application/json";
  if (apiKey()) headers.authorization = `Bearer ${apiKey()}`;
  return headers;
}

/** The error that an answer holds, whichever API wrote it. */
export function errorOf(status, value) {
  const error = value?.error ?? value;
  const message = typeof error === "string" ? error : error?.message;
  return new APIError(status, error?.code ?? value?.code ?? "", message ?? `The server answered ${status}.`);
}

/** Sends a request and gives the Response, whatever its status. */
export async function send(path, { method, body, signal, keepalive } = {}) {
  try {
    return await fetch(path, {
      method: method ?? (body === undefined ? "GET" : "POST"),
      headers: headersOf(body),
      body: body === undefined ? undefined : typeof body === "string" ? body : JSON.stringify(body),
      signal,
      keepalive,
      credentials: "omit",
      cache: "no-store",
      redirect: "error",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new APIError(0, "", "The server does not answer.");
  }
}

/** Sends a request; throws an APIError unless it went well. */
export async function call(path, options) {
  const response = await send(path, options);
  if (response.ok) return response;
  const value = await response.json().catch(() => null);
  if (response.status === 401) hooks.unauthorized();
  throw errorOf(response.status, value);
}

/** Sends a file, or a form with files; the JSON of the answer. progress: takes the share that was sent, from 0 to 1. Throws as call() does. */
export function upload(path, body, { progress, signal }) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest(); // fetch tells nothing of what it has sent
    request.open("POST", path);
    request.responseType = "json";
    if (!(body instanceof FormData)) request.setRequestHeader("content-type", "application/octet-stream");
    if (apiKey()) request.setRequestHeader("authorization", `Bearer ${apiKey()}`);
    request.upload.onprogress = ({ loaded, total }) => progress(total ? loaded / total : 0);
    request.upload.onload = () => progress(1);
    request.onload = () => {
      if (request.status === 401) hooks.unauthorized();
      if (request.status === 200) resolve(request.response);
      else reject(errorOf(request.status, request.response));
    };
    request.onerror = () => reject(new APIError(0, "", "The server does not answer, or has refused the file."));
    request.onabort = () => reject(new DOMException("stopped", "AbortError"));
    signal.addEventListener("abort", () => request.abort());
    request.send(body);
  });
}

export const getJSON = async (path, options) => (await call(path, options)).json();

/** The lines of an answer as they come. */
export async function* lines(response) {
  const decoder = new TextDecoder();
  let rest = "";
  for (const reader = response.body.getReader(); ; ) {
    const { done, value } = await reader.read();
    rest += done ? decoder.decode() : decoder.decode(value, { stream: true });
    const found = rest.split("\n");
    rest = found.pop();
    yield* found;
    if (done) break;
  }
  if (rest) yield rest;
}

/** The data of server-sent events, decoded, up to [DONE]. An event that holds an error is thrown. */
export async function* events(response) {
  for await (const line of lines(response)) {
    if (!line.startsWith("data:")) continue;
    const data = line.slice(5).trim();
    if (data === "[DONE]") return;
    const value = JSON.parse(data);
    if (value.error) throw errorOf(response.status, value);
    yield value;
  }
}
