/* One job `of` plans or portfolios: the trace sent if it must be, ordered, followed to its end, or cancelled. */

import { Refused, ask } from "./api.js";
import { EventStream } from "./event_stream.js";
import { toOrder } from "./plan_question.js";

const OVER = ["done", "failed", "cancelled"];

/** Send a trace file; the API's summary of it. */
export function sendTrace(file) {
  // The name is for people only, and the API takes no slash in it.
  const name = file.name.replaceAll("/", "_").slice(0, 200) || "trace";
  return ask("POST", `/v1/traces?name=${encodeURIComponent(name)}`, {
    body: file,
    headers: { "content-type": "application/octet-stream" },
  });
}

/** Order a plan; the new job. */
export const order = (question) => ask("POST", "/v1/plans", { json: toOrder(question) });

/** The job with its answer. */
export const job = (id, of = "plans") => ask("GET", `/v1/${of}/${encodeURIComponent(id)}`);

/** Ask for an end; the job may have ended meanwhile. */
export async function cancel(id, of = "plans") {
  try {
    await ask("DELETE", `/v1/${of}/${encodeURIComponent(id)}`);
  } catch (error) {
    if (!(error instanceof Refused && error.status === 409)) throw error;
  }
}

/** Follow a job until it is over, and return it with its answer. `onChange(job)` on every change, `onState` as in
 *  EventStream. */
export async function followed(id, { onChange, onState, signal }, of = "plans") {
  const stream = new EventStream(`/v1/${of}/${encodeURIComponent(id)}/events`, {
    signal,
    onState,
    onEvent: ({ data }) => {
      const now = JSON.parse(data);
      onChange(now);
      return OVER.includes(now.state);
    },
  });
  await stream.run();
  return job(id, of);
}

/** The last jobs, newest first. */
export async function recent(limit, of) {
  return (await ask("GET", `/v1/${of}?limit=${limit}`))[of];
}
