/* Talking to the control API. The key a person types stays in this tab (sessionStorage), never in an address. */

import { askForKey } from "./key_dialog.js";

const KEY = "tokenfleet.key";

/** The API refused; `message` is its one line. */
export class Refused extends Error {
  constructor(status, message, retryAfterS) {
    super(message);
    this.status = status;
    this.retryAfterS = retryAfterS;
  }
}

/** Nobody answered. */
export class Unreachable extends Error {}

/** The reply to one request, with the key where one is known; asks for it on 401. Raises Refused, Unreachable. */
export async function send(method, path, { headers = {}, body, signal } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const sent = key === null ? headers : { ...headers, authorization: `Bearer ${key}` };
    let reply;
    try {
      reply = await fetch(path, {
        method,
        headers: sent,
        body,
        signal,
        cache: "no-store",
        redirect: "error",
      });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Unreachable("the control API does not answer");
    }
    if (reply.ok) return reply;
    if (reply.status !== 401) throw await refusal(reply);
    // Another request may have been given a newer key meanwhile.
    if (sessionStorage.getItem(KEY) === key) {
      sessionStorage.setItem(KEY, await askForKey(key === null ? "" : "That key was refused."));
    }
  }
}

/** The JSON of a reply; `json` is sent as the body. */
export async function ask(method, path, { json, headers = {}, ...rest } = {}) {
  const sent = json === undefined ? headers : { ...headers, "content-type": "application/json" };
  const body = json === undefined ? rest.body : JSON.stringify(json);
  const reply = await send(method, path, { ...rest, headers: sent, body });
  try {
    return await reply.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Unreachable("the control API broke off its answer");
  }
}

/** Whether this API has that path: asking for one that is not there would stand on the console as an error. */
export async function offers(path) {
  return path in (await ask("GET", "/openapi.json")).paths;
}

async function refusal(reply) {
  let message = `${reply.status} ${reply.statusText}`.trim();
  try {
    const body = await reply.json();
    if (typeof body.error?.message === "string") message = body.error.message;
  } catch {
    // Not one of ours: the status has to do.
  }
  const after = Number(reply.headers.get("retry-after"));
  return new Refused(reply.status, message, Number.isFinite(after) ? after : 0);
}
